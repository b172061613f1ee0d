"""The exact planner against enumeration, on random tables by the dozen and on the default problem."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.stage_costs import OuterCosts
from darts_parallel.exact._pareto import pareto
from darts_parallel.exact._stage_fronts import StagewiseFronts
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.uniform import find_uniform_plan
from darts_parallel.problem.problem import load_problem
from tests.support.exact_check import check
from tests.support.optima import assert_same_optimum
from tests.support.random_tables import random_table


def table_of(seed: int) -> CostTable:
    """A tiny table: 1 to 3 stages, 3 to 6 layers, resharding, memory from hopeless to ample."""
    rng = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    pp = pick(1, 3)
    num_layers = pick(max(3, pp + 1), 6)
    num_choices = pick(2, 4 if num_layers < 6 else 3)
    return random_table(
        seed,
        pp=pp,
        num_layers=num_layers,
        num_choices=num_choices,
        num_layouts=pick(1, min(num_choices, 3)),
        num_outer=pick(1, 3),
        equal_layers=seed % 3 == 0,
        tightness=1.2 * float(torch.rand(1, generator=rng)),
    )


@pytest.mark.parametrize("first", range(0, 28, 14))
def test_layerwise_optimum_equals_brute_force(first: int) -> None:
    costs = [
        assert_same_optimum([table_of(seed)], "layerwise") for seed in range(first, first + 14)
    ]
    # enough tables have a plan, and some have none, so that the comparison means something
    assert 5 <= sum(map(math.isfinite, costs)) < 14


@pytest.mark.parametrize("mode", ["stagewise", "uniform"])
def test_smaller_spaces_equal_brute_force(mode: str) -> None:
    for seed in range(14):
        assert_same_optimum([table_of(seed)], mode)


@pytest.mark.parametrize("mode", ["uniform", "stagewise", "layerwise"])
def test_strategies_that_only_some_stages_run_are_taken_there_alone(mode: str) -> None:
    differs = 0
    for seed in range(10):
        rng = torch.Generator().manual_seed(seed)
        table = random_table(seed, pp=2 + seed % 2, num_layers=5, num_outer=1, tightness=3.0)
        kinds = torch.arange(2).repeat(table.pp)[: table.pp]
        two = {
            name: getattr(table, name)[:, :1].repeat(1, 2, *[1] * (getattr(table, name).dim() - 2))
            for name in ("forward", "backward", "weight_gradient", "sync", "reshard")
        }
        runs = torch.rand(2, 3, generator=rng) < 0.6
        runs[:, seed % 3] = True
        table = replace(table, **two, stage_kind=kinds, kind_allowed=None)
        free = assert_same_optimum([table], mode)
        found = assert_same_optimum([replace(table, kind_allowed=runs)], mode)
        assert found >= free
        differs += found > free
    assert differs >= 3


def test_several_tables_give_the_best_of_all() -> None:
    for seed in range(6):
        tables = [random_table(seed, pp=pp, num_layers=5) for pp in (1, 2, 3)]
        expected, found = brute_force(tables, "layerwise"), find_layerwise_plan(tables, "layerwise")
        assert found.cost == pytest.approx(expected.cost, rel=1e-12)
        assert found.best.table == expected.best.table


@pytest.mark.parametrize("mode", ["uniform", "stagewise", "layerwise"])
def test_an_incumbent_as_good_as_the_optimum_is_reached_and_a_better_one_refuted(mode: str) -> None:
    for seed in range(6):
        table = table_of(seed)
        best = brute_force([table], mode)
        if best.best is None:
            continue
        assert find_layerwise_plan([table], mode, incumbent=best.cost).cost == pytest.approx(
            best.cost, rel=1e-12
        )
        refuted = find_layerwise_plan([table], mode, incumbent=best.cost * 0.999)
        assert refuted.best is None
        assert refuted.proven
        assert best.cost * 0.999 <= refuted.lower_bound <= best.cost


@pytest.mark.parametrize("mode", ["uniform", "stagewise", "layerwise"])
def test_a_plan_that_fits_to_the_byte_is_found(mode: str) -> None:
    for seed in range(6):
        table = table_of(seed)
        best = brute_force([table], mode).best
        if best is not None:
            exact = replace(table, capacity=evaluate_batch(table, best.plan).memory[0])
            found = find_layerwise_plan([exact], mode)
            assert found.cost == pytest.approx(best.time, rel=1e-12)


@pytest.mark.parametrize("mode", ["uniform", "stagewise", "layerwise"])
def test_a_deadline_in_the_past_proves_nothing_and_says_so(mode: str) -> None:
    result = find_layerwise_plan([random_table(1)], mode, deadline=time.monotonic() - 1.0)
    assert not result.proven
    assert result.lower_bound <= brute_force([random_table(1)], mode).cost


def test_the_default_problem_is_solved_and_its_plan_costs_what_was_claimed() -> None:
    problem = load_problem(["model=gpt2_xl", "training=gpt2_xl"])
    result = check(problem)
    assert result.proven
    cost = evaluate(result.plan, problem)
    assert cost.feasible
    assert cost.iteration_time_s == pytest.approx(result.iteration_time_s, rel=1e-9)
    assert result.seconds < 20.0


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
@pytest.mark.parametrize(("states", "paid"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("many", [0, 400], ids=["compiled", "not compiled"])
def test_pareto_keeps_a_dominator_of_everything_it_drops(
    columns: int, states: int, paid: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_parallel.exact._pareto.MANY", many)
    monkeypatch.setattr("darts_parallel.exact._pareto.CHUNK", 32)
    rng = np.random.default_rng(columns + 10 * states)
    values = rng.integers(0, 6, (400, columns)).astype(float)
    values[:, 0] *= columns < 5  # a column that is paid may be of nothing
    keys = rng.integers(0, states, 400)
    offsets = 1.0 - np.eye(states)
    kept = pareto(values, keys, offsets, paid=paid)
    assert len(set(kept.tolist())) == len(kept)

    def dominated(row: int, by: np.ndarray) -> bool:
        after = values[by].copy()
        after[:, :paid] += offsets[keys[by], keys[row]][:, None]
        return bool((after <= values[row]).all(axis=1).any())

    assert all(dominated(row, kept) for row in range(400))
    assert not any(dominated(row, kept[kept != row]) for row in kept.tolist())


def test_compiled_code_keeps_the_same_labels_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    values = rng.random((900, 3))
    keys = rng.integers(0, 4, 900)
    offsets = 0.1 * (1.0 - np.eye(4))
    slow = pareto(values, keys, offsets)
    monkeypatch.setattr("darts_parallel.exact._pareto.MANY", 0)
    assert pareto(values, keys, offsets).tolist() == slow.tolist()


def test_a_time_that_is_over_leaves_the_uniform_plan() -> None:
    tables = [random_table(0, tightness=2.0)]
    uniform = find_uniform_plan(tables)
    found = find_layerwise_plan(tables, "layerwise", deadline=0.0, uniform=uniform)
    assert found.best is uniform.best is not None
    assert not found.proven


@pytest.mark.parametrize("seed", [0, 8, 20, 27])
def test_seconds_that_are_paid_once_count_as_they_cost(seed: int) -> None:
    table = random_table(seed, pp=2, num_layers=5, tightness=1.0)
    drawn = torch.rand(
        table.per_iteration[:, 0].shape, generator=torch.Generator().manual_seed(seed)
    )
    once = torch.zeros_like(table.per_iteration)
    once[:, 0] = 20.0 * drawn
    assert_same_optimum([replace(table, per_iteration=once)], "layerwise")


@pytest.mark.parametrize("seed", [10, 15, 20, 21])
def test_a_slow_boundary_counts_before_and_after_a_stage(seed: int) -> None:
    table = random_table(seed, pp=3, num_choices=4, num_layouts=3, num_outer=1, tightness=2.0)
    assert_same_optimum([replace(table, p2p=6.0 * table.p2p)], "layerwise")


def test_strategies_are_compared_within_their_layout() -> None:
    values = np.array([[2.0, 2.0], [1.0, 1.0], [3.0, 0.5], [5.0, 5.0]])
    apart = np.array([[0.0, np.inf], [np.inf, 0.0]])
    kept = pareto(values, np.array([0, 0, 0, 1]), apart, paid=2)
    assert sorted(kept.tolist()) == [1, 2, 3]


def test_every_front_of_a_stage_asks_whether_the_time_is_over() -> None:
    asked = []

    def late(labels: int = 0) -> None:
        asked.append(labels)
        raise DeadlineError

    fronts = StagewiseFronts(OuterCosts.read(table_of(0), 0), late)
    for end in (1, 2):
        with pytest.raises(DeadlineError):
            fronts.front(0, 0, end)
    assert len(asked) == 2
