from dataclasses import replace

import pytest
import torch

from darts_parallel import evaluate, load_problem, search
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.enumeration import number_of_plans
from darts_parallel.exact.simulated import find_simulated_plan, simulated_lower_bound
from tests.support.exact_check import check

TOY = ["model=toy", "cluster=toy", "training=toy"]
TINY = [
    *TOY,
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
    priced = evaluate(best.plan, problem).iteration_time_s
    assert best.iteration_time_s == pytest.approx(priced, rel=1e-12)
    found = search(problem, seed=0)
    assert found.iteration_time_s >= best.iteration_time_s * (1 - 1e-12)
    assert found.iteration_time_s <= best.iteration_time_s * 1.01


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_large_space_gets_the_closed_forms_optimum_without_a_proof(schedule: str) -> None:
    given = [*TOY, "space.pp=2"]
    problem = load_problem([*given, "cost.pipeline=simulated", f"cost.schedule={schedule}"])
    answer = check(problem)
    closed = check(load_problem(given))
    assert not answer.proven
    assert 0.7 * answer.iteration_time_s < answer.lower_bound_s < answer.iteration_time_s
    assert "only the bound is proven" in answer.note
    assert answer.plan == closed.plan
    assert answer.iteration_time_s == evaluate(answer.plan, problem).iteration_time_s


def test_plans_are_counted_as_they_are_enumerated() -> None:
    tables = build_tables(load_problem(TINY))
    never = lambda *_: pytest.fail("the space is small")  # noqa: E731
    answer = find_simulated_plan(tables, "uniform", never, never)
    assert number_of_plans(tables, "uniform") == answer.plans_evaluated


def test_a_closed_form_plan_of_a_schedule_that_is_not_listed_is_no_answer() -> None:
    given = [*TOY, "space.pp=2", "space.num_micro_batches=4"]
    answer = check(load_problem([*given, "space.schedules=[zero_bubble_v]"]))
    assert answer.plan is None
    assert 0 < answer.lower_bound_s < float("inf")
    listed = check(load_problem([*given, "space.schedules=[zero_bubble_v,1f1b]"]))
    assert listed.plan.schedule_name == "1f1b"


def test_after_the_deadline_the_loosest_bound_that_was_not_improved_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = build_tables(load_problem([*TOY, "cost.pipeline=simulated"]))
    assert sum(table.num_outer for table in tables) > 4
    bounds = iter(range(1, 1000))

    def work_bounds(table: object, space_kind: str, late: object) -> torch.Tensor:
        return torch.tensor([float(next(bounds)) for _ in range(table.num_outer)])

    clock = iter(range(1000))
    improved = []

    def packed(table: object, outer: int) -> float:
        improved.append(outer)
        return 1e9

    module = "darts_parallel.exact.simulated"
    monkeypatch.setattr("darts_parallel.exact.bounds.outer_lower_bounds", work_bounds)
    monkeypatch.setattr(f"{module}.packed_bound", packed)
    monkeypatch.setattr(f"{module}.monotonic", lambda: next(clock))
    # three outer choices are improved at the times 0, 1 and 2; the fourth has the least bound
    assert simulated_lower_bound(tables, "layerwise", deadline=2.5) == 4.0
    assert len(improved) == 3


def test_where_the_order_is_free_the_best_rule_is_no_proof() -> None:
    tables = build_tables(load_problem(TINY))
    free = [replace(table, pipeline=replace(table.pipeline, free=True)) for table in tables]
    never = lambda *_: pytest.fail("the space is small")  # noqa: E731
    by_rules, answer = (
        find_simulated_plan(some, "uniform", never, never) for some in (tables, free)
    )
    assert by_rules.proven
    assert by_rules.lower_bound_s == by_rules.iteration_time_s
    assert not answer.proven
    assert answer.plan == by_rules.plan
    assert 0 < answer.lower_bound_s < answer.iteration_time_s
    assert "order" in answer.note
    # once the time is over looser bounds stand
    late = find_simulated_plan(free, "uniform", never, never, deadline=0.0)
    assert 0 < late.lower_bound_s <= answer.lower_bound_s
