import pytest

from darts_parallel import evaluate, load_problem, search
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.simulated import (
    find_simulated_plan,
    number_of_plans,
    simulated_lower_bound,
)
from darts_parallel.planner.methods import check

TINY = [
    "model=toy",
    "cluster=toy",
    "training=toy",
    "cost.pipeline=simulated",
    "space=uniform",
    "space.pp=[1,2]",
    "space.sequence_parallel=false",
    "space.num_micro_batches=[4,8]",
    "search.num_steps=30",
]


def test_a_small_uniform_space_is_proven_by_simulating_every_plan() -> None:
    problem = load_problem(TINY)
    best = check(problem, "exhaustive")
    assert best.proven
    assert best.note == "every plan was simulated"
    assert best.iteration_time_s == pytest.approx(
        evaluate(best.plan, problem).iteration_time_s, rel=1e-12
    )
    found = search(problem, seed=0)
    assert found.iteration_time_s >= best.iteration_time_s * (1 - 1e-12)
    assert found.iteration_time_s <= best.iteration_time_s * 1.01


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_large_space_gets_the_closed_forms_optimum_without_a_proof(schedule: str) -> None:
    given = ["model=toy", "cluster=toy", "training=toy", "space.pp=2"]
    problem = load_problem([*given, "cost.pipeline=simulated", f"cost.schedule={schedule}"])
    answer = check(problem)
    closed = check(load_problem(given))
    assert not answer.proven
    assert 0.8 * answer.iteration_time_s < answer.lower_bound_s < answer.iteration_time_s
    assert "only the bound is proven" in answer.note
    assert answer.plan == closed.plan
    assert answer.iteration_time_s == evaluate(answer.plan, problem).iteration_time_s


def test_plans_are_counted_as_they_are_enumerated() -> None:
    problem = load_problem(TINY)
    tables = build_tables(problem)
    never = lambda *_: pytest.fail("the space is small")  # noqa: E731
    answer = find_simulated_plan(tables, "uniform", never, never)
    assert number_of_plans(tables, "uniform") == answer.plans_evaluated


def test_a_closed_form_plan_of_a_schedule_that_is_not_listed_is_no_answer() -> None:
    given = ["model=toy", "cluster=toy", "training=toy", "space.pp=2", "space.num_micro_batches=4"]
    problem = load_problem([*given, "space.schedules=[zero_bubble_v]"])
    answer = check(problem)
    assert answer.plan is None
    assert 0 < answer.lower_bound_s < float("inf")
    listed = check(load_problem([*given, "space.schedules=[zero_bubble_v,1f1b]"]))
    assert listed.plan.schedule_name == "1f1b"


def test_bounds_end_with_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy", "cost.pipeline=simulated"])
    tables, now, asked = build_tables(problem), [0.0], []

    def slow_bound(table: object, outer: int, *, deadline: float, **given: object) -> float:
        assert deadline == 2.5
        asked.append(outer)
        now[0] += 1.0
        return 1e9

    monkeypatch.setattr("darts_parallel.exact.simulated.monotonic", lambda: now[0])
    monkeypatch.setattr("darts_parallel.exact.simulated.chain_bound", slow_bound)
    assert sum(table.num_outer for table in tables) > 3
    simulated_lower_bound(tables, "layerwise", seconds=2.5)
    assert len(asked) == 3
