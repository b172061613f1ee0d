"""Trials: seconds of untried plans follow the scale, out of memory excludes, a surprise changes the best."""

from collections.abc import Iterator
from math import log

import pytest

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import PlanError
from darts_parallel.planner.planning import plan
from darts_parallel.planner.run_figures import Trial
from darts_parallel.planner.tuning import Tuning, tune
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.exact_check import check


@pytest.fixture(scope="module", autouse=True)
def few() -> Iterator[None]:
    """A third of the candidates: each takes a tenth of a second in every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("darts_parallel.planner.tuning.CANDIDATES", 8)
        yield


@pytest.fixture(scope="module")
def job() -> tuple[Problem, Tuning]:
    problem = load_problem(
        [
            "model=toy",
            "cluster=toy",
            "training=toy",
            "space.recompute=none",
            "space.sequence_parallel=false",
            "cluster.devices.toy.reserved_GiB=0.001",
            "cluster.devices.toy.memory_GiB=0.004",
        ]
    )
    return problem, tune(problem, _first(problem), [])


def _first(problem: Problem) -> object:

    return check(problem, "exhaustive").plan


def test_without_trials_the_order_is_the_models(job: tuple[Problem, Tuning]) -> None:
    _, state = job
    alone = [p.predicted_s for p in state.proposals]
    assert alone == sorted(alone)
    assert [p.expected_s for p in state.proposals] == pytest.approx(alone)
    assert len(state.next(3)) == 3


def test_without_trials_whatever_the_model_lets_fit_is_proposed(
    job: tuple[Problem, Tuning],
) -> None:
    # more than nine tenths of a device are used: full devices are no reason to leave a plan out
    tight = load_problem(
        [
            "model=toy",
            "cluster=toy",
            "training=toy",
            "space.recompute=none",
            "space.sequence_parallel=false",
            "cluster.devices.toy.memory_GiB=0.106",
        ]
    )
    state, best = tune(tight, _first(tight), []), _first(tight)
    cost = evaluate(best, tight)
    assert max(u / c for u, c in zip(cost.memory_bytes, cost.capacity_bytes, strict=True)) > 0.9
    assert len(state.proposals) == len(job[1].proposals)
    assert state.excluded == job[1].excluded


def test_one_trial_moves_all_seconds_and_narrows_them(job: tuple[Problem, Tuning]) -> None:
    problem, before = job
    first = before.proposals[0]
    after = tune(problem, first.plan, [Trial("a", first.plan, 1.3 * first.predicted_s)])
    assert after.scale == pytest.approx(1.3)
    shifts = [log(p.expected_s / p.predicted_s) / log(1.3) for p in after.proposals]
    assert min(shifts) > 0.4
    assert max(shifts) < 1.3
    widths = [
        {p.plan: log(p.interval_s[1] / p.expected_s) for p in s.proposals} for s in (before, after)
    ]
    assert all(widths[1][plan] < widths[0][plan] for plan in widths[1])
    for proposal in after.proposals:
        low, high = proposal.interval_s
        assert low * high == pytest.approx(proposal.expected_s**2)
    assert first.plan not in [p.plan for p in after.next(3)]


def test_a_plan_that_ran_out_of_memory_takes_the_fuller_ones_with_it(
    job: tuple[Problem, Tuning],
) -> None:
    problem, before = job

    def fill(plan: object) -> float:
        cost = evaluate(plan, problem)  # type: ignore[arg-type]
        return max(u / c for u, c in zip(cost.memory_bytes, cost.capacity_bytes, strict=True))

    failed = sorted(before.proposals, key=lambda p: fill(p.plan))[len(before.proposals) // 2].plan
    after = tune(problem, before.proposals[0].plan, [Trial("a", failed, None)])
    assert after.excluded > 0
    assert all(fill(p.plan) < fill(failed) for p in after.proposals)
    lightest = min(before.proposals, key=lambda p: fill(p.plan)).plan
    with pytest.raises(PlanError, match="every candidate needs"):
        tune(problem, lightest, [Trial("a", lightest, None)])


def test_a_measured_peak_moves_the_chance_of_every_plan(job: tuple[Problem, Tuning]) -> None:
    first = job[1].proposals[0]
    peak = 0.9 * max(evaluate(first.plan, job[0]).memory_bytes)
    after = tune(job[0], first.plan, [Trial("a", first.plan, first.predicted_s, peak)])
    before = {p.plan: p.chance for p in job[1].proposals}
    known = [(p.chance, before[p.plan]) for p in after.proposals if before.get(p.plan, 0.0) > 1e-6]
    assert known
    assert all(now < then for now, then in known)


def test_a_plan_measured_faster_than_expected_becomes_the_best(job: tuple[Problem, Tuning]) -> None:
    problem, before = job
    first, second = before.proposals[0], before.proposals[5]
    trials = [
        Trial("a", first.plan, first.predicted_s),
        Trial("b", second.plan, 0.6 * first.predicted_s),
    ]
    assert tune(problem, first.plan, trials).proposals[0].plan == second.plan


@pytest.mark.parametrize("more", ["cost.pipeline=simulated", "space.offload=[optimizer]"])
def test_candidates_are_priced_as_the_plan_is(more: str) -> None:
    """Stages of five layers are uneven, which no exact method ranks where pipelines are simulated."""
    problem = load_problem(
        [
            "model=toy",
            "cluster=toy",
            "training=toy",
            "space=uniform",
            "space.recompute=none",
            "space.pp=2",
            "model.num_layers=5",
            "search.num_steps=5",
            "search.num_restarts=2",
            more,
        ]
    )
    found = plan(problem).plan
    state = tune(problem, found, [])
    assert len(state.proposals) > 2
    assert state.proposals[0].predicted_s <= evaluate(found, problem).iteration_time_s * (1 + 1e-9)
