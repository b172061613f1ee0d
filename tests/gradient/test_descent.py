import json
import re
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from darts_parallel import evaluate, plan, search
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.result import Verification
from darts_parallel.gradient import descent
from darts_parallel.gradient._stopwatch import Stopwatch
from darts_parallel.gradient.descent import GradientSearch, search_tables
from darts_parallel.gradient.settling import SETTLE_FROM
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plans.legality import check_plan
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.exact_check import check
from tests.support.random_tables import random_table

QUICK = SearchConfig(num_steps=60, num_restarts=8)
TIGHT = [
    "model=gpt2_xl",
    "training=gpt2_xl",
    "cluster=a10_4x4",
    "model.num_layers=12",
    "cluster.devices.a10.memory_GiB=2.25",
    "cluster.devices.a10.reserved_GiB=1",
]
"""The best plan of each space is another one."""


@cache
def oracle(kind: str) -> Verification:
    return check(load_problem([*TIGHT, f"space={kind}"]))


@pytest.mark.parametrize("kind", ["uniform", "stagewise", "layerwise"])
def test_the_plan_is_legal_feasible_and_never_beats_the_oracle(kind: str) -> None:
    problem = load_problem([*TIGHT, f"space={kind}"])
    result = search(problem, seed=0, config=QUICK)
    check_plan(result.plan, problem.model, problem.cluster, problem.training, problem.measured)
    cost = evaluate(result.plan, problem)
    assert cost.feasible
    assert cost.iteration_time_s == pytest.approx(result.iteration_time_s, rel=1e-9)
    assert result.iteration_time_s <= result.raw_iteration_time_s * (1 + 1e-12)
    assert [own.name for own in result.stages] == ["relaxed", "repaired", "fitted", "polished"]
    assert oracle(kind).proven
    optimum = oracle(kind).iteration_time_s
    assert result.iteration_time_s >= optimum * (1 - 1e-9)
    assert result.iteration_time_s <= optimum * 1.02  # few steps, few restarts
    if kind == "uniform":
        assert len(set(result.plan.layers)) == 1
        assert check(problem, "exhaustive").iteration_time_s == pytest.approx(optimum, rel=1e-9)


def test_wider_spaces_are_never_worse() -> None:
    times = [oracle(kind).iteration_time_s for kind in ("uniform", "stagewise", "layerwise")]
    assert times[0] > times[1] > times[2]


def test_an_outer_choice_that_left_is_polished_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        descent,
        "outer_lower_bounds",
        lambda table, known, late: torch.zeros(table.num_outer, dtype=torch.float64),
    )  # bounds exclude none
    tables = [random_table(1, pp=2, num_outer=4, tightness=1.5)]
    results = []
    for margin in (1e9, 1e-9):
        monkeypatch.setattr(descent, "PRUNE_MARGIN", margin)
        results.append(descent.search_tables(tables, "layerwise", QUICK, 0))
    all_stay, one_stays = (result for result in results if result is not None)
    # in the last steps, at whole boundaries, the best configurations alone go on
    counts = []
    for found in (all_stay, one_stays):
        moving = [r for r in found.history if r.step < SETTLE_FROM * QUICK.num_steps]
        counts.append(len(moving[-1].outer_weights))
    assert counts == [4, 1]
    assert one_stays.iteration_time_s == pytest.approx(all_stay.iteration_time_s, rel=1e-9)


def test_equal_seeds_give_equal_plans(toy_problem: Problem) -> None:
    config = replace(QUICK, num_steps=20)
    first, second = (search(toy_problem, seed=3, config=config) for _ in range(2))
    assert first.plan == second.plan
    assert first.stages == second.stages
    assert json.dumps(first.iteration_time_s) == json.dumps(second.iteration_time_s)
    assert [r.loss for r in first.history] == [r.loss for r in second.history]
    other = search(replace_seed(toy_problem, 4), config=config)
    assert (first.seed, other.seed) == (3, 4)
    shown = repr(first)
    assert repr(first.plan) in shown
    assert len(shown) < len(repr(first.plan)) + 1000, "curves and other plans are not shown"
    printed = str(first)
    assert printed.startswith(f"{first.iteration_time_s:.4g} s · pp {first.plan.pp} · ")
    counts = re.findall(r"(\d+) × tp", printed)
    assert sum(map(int, counts)) == len(first.plan.layers)
    assert len(printed) < 300
    assert [r.loss for r in first.history] != [r.loss for r in other.history]


def replace_seed(problem: Problem, seed: int) -> Problem:
    """Return the problem whose configuration has another seed."""
    settings = replace(problem.config.search, seed=seed)
    return replace(problem, config=replace(problem.config, search=settings))


def test_every_restart_of_every_configuration_has_a_gradient(toy_problem: Problem) -> None:
    class Still(GradientSearch):
        def _lower_bounds(self) -> list[torch.Tensor]:  # excludes nothing
            return [torch.zeros(table.num_outer) for table in self.pool.tables]

        def move(self) -> None:
            pass

    still = Still(build_tables(toy_problem), "layerwise", QUICK, 0)
    still._one_step()
    assert len(still.groups) > 1
    for group in still.groups:
        slopes = group.logits.grad
        assert slopes.shape[1] > 1
        assert (slopes.flatten(2).abs().sum(-1) > 0).all()
    slopes = still.outer_logits.grad
    assert len(slopes) > 2
    assert (slopes != 0).all()
    # more weight on one configuration is less on the others
    assert float(slopes.sum()) == pytest.approx(0.0, abs=1e-12)


def test_the_relaxed_search_finds_better_plans_than_where_it_begins() -> None:
    problem = load_problem([*TIGHT, "space.pp=[2,4]"])
    records: list[StepRecord] = []
    result = search(problem, seed=0, config=replace(QUICK, polish=False), on_record=records.append)
    fitted = next(stage for stage in result.stages if stage.name == "fitted")
    assert fitted.iteration_time_s == result.iteration_time_s
    assert records[-1].best_time_s < records[0].best_time_s
    assert records[-1].entropy < records[0].entropy
    for record in records:
        assert sum(record.terms.values()) == pytest.approx(record.surrogate_time_s, rel=1e-9)


def test_clock_and_watchers_change_no_plan(
    toy_problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(QUICK, num_steps=30, max_seconds=100.0)
    watched_seconds = 0.0
    real = time.perf_counter
    monkeypatch.setattr(
        "darts_parallel.gradient._stopwatch.time.perf_counter", lambda: real() + watched_seconds
    )

    def watch(record: StepRecord) -> None:
        nonlocal watched_seconds
        watched_seconds += 1000.0  # each picture takes longer than the whole search may

    quiet = search(toy_problem, seed=1, config=config)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        watched = search(toy_problem, seed=1, config=config, on_record=watch)
    finally:
        torch.set_num_threads(threads)
    assert watched_seconds > 1000.0
    assert watched.stopped_by is quiet.stopped_by is None
    assert watched.steps == quiet.steps == 30
    assert watched.seconds < 100.0
    assert (watched.plan, watched.stages) == (quiet.plan, quiet.stages)
    assert [record.loss for record in watched.history] == [record.loss for record in quiet.history]


def test_what_a_time_limit_cuts_short_is_polished_and_what_ctrl_c_cuts_short_is_not() -> None:
    problem = load_problem(["experiment=quick"])
    config = SearchConfig(num_steps=10**6, num_restarts=2, max_seconds=2.0)

    def interrupt(record: StepRecord) -> None:
        if record.step >= 20:
            raise KeyboardInterrupt

    limited = search(problem, seed=0, config=config)
    stopped = search(
        problem, seed=0, config=replace(config, max_seconds=600.0), on_record=interrupt
    )
    assert (limited.stopped_by, stopped.stopped_by) == ("time_limit", "user")
    best = check(problem).iteration_time_s
    assert limited.iteration_time_s == pytest.approx(best, rel=1e-9)
    times = {stage.name: stage.iteration_time_s for stage in stopped.stages}
    assert stopped.iteration_time_s == times["fitted"] == times["polished"]


class StoppedClock(Stopwatch):
    """Shows one time for ever."""

    seconds = 26.0


def test_what_comes_before_the_first_step_leaves_half_of_the_seconds_for_steps() -> None:
    tables = build_tables(load_problem([*TIGHT, "space.virtual_stages=null"]))
    # 50 seconds for the descent, 25 of them until its first step
    config = replace(QUICK, num_steps=3, max_seconds=100.0)
    run = descent.GradientSearch(tables, "layerwise", config, 0, StoppedClock())
    assert {entry.table for entry in run.pool.by_outer()} < set(range(len(tables)))
    run.run()
    assert (run.step, run.stopped_by) == (3, None)


@pytest.mark.parametrize("pipeline", ["closed_form", "simulated"])
def test_chains_of_many_layers_have_a_plan_and_bounds(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = load_problem(
        [
            "model=toy",
            "cluster=toy",
            "training=toy",
            f"cost.pipeline={pipeline}",
            "search.num_steps=5",
            "search.num_restarts=2",
        ]
    )
    best = plan(problem)
    monkeypatch.setattr("darts_parallel.exact.segments.MAX_SEGMENTS", 0)
    found = plan(problem)
    assert all(a.lower_bound_s <= best.result.iteration_time_s * (1 + 1e-9) for a in found.answers)
    assert found.result.iteration_time_s >= best.result.iteration_time_s * (1 - 1e-9)


def test_without_polishing_the_fitted_plan_is_the_answer() -> None:
    table = random_table(0, num_outer=2, tightness=2.0)
    config = SearchConfig(num_steps=2, num_restarts=1, fitting="repair", polish=False)
    fitted = search_tables([table], "layerwise", config, 0)
    polished = search_tables([table], "layerwise", replace(config, polish=True), 0)
    assert fitted is not None
    assert polished is not None
    times = {stage.name: stage.iteration_time_s for stage in fitted.stages}
    assert fitted.iteration_time_s == times["fitted"] == times["polished"]
    assert polished.iteration_time_s < fitted.iteration_time_s
