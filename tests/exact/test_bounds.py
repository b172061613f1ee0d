"""Lower bounds: never above a true optimum, and close to it on the default problem."""

import math
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.stage_costs import OuterCosts
from darts_parallel.cost.table import build_tables
from darts_parallel.exact._pareto import price_grid
from darts_parallel.exact.bounds import outer_lower_bounds, spread_bounds
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.segment_grid import SegmentGrid
from darts_parallel.problem.problem import load_problem
from tests.support.exact_check import check
from tests.support.random_tables import random_table


def small_table(seed: int) -> CostTable:
    """A table of 1 to 3 stages and 1 to 3 layouts; every third with runs of equal layers."""
    return random_table(
        seed,
        pp=1 + seed % 3,
        num_layers=4 + seed % 2,
        num_choices=3,
        num_layouts=1 + seed // 2 % 3,
        equal_layers=seed % 3 == 0,
        tightness=0.2 * (seed % 7),
    )


@pytest.mark.parametrize("mode", ["uniform", "stagewise", "layerwise"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_bound_of_every_outer_choice_lies_below_its_cheapest_plan(
    first: int, mode: str
) -> None:
    for seed in range(first, first + 20):
        table = small_table(seed)
        bounds = outer_lower_bounds(table, mode)
        assert not bounds.isnan().any()
        for outer in range(table.num_outer):
            best = brute_force([table.select([outer])], mode)
            assert float(bounds[outer]) <= best.cost * (1 + 1e-12)
            if mode == "layerwise":  # what no strategies fit into is known as such
                assert math.isinf(bounds[outer]) == math.isinf(best.cost)


def test_the_bound_of_a_larger_space_is_never_larger() -> None:
    for seed in range(30):
        table = small_table(seed)
        larger, smaller = (outer_lower_bounds(table, mode) for mode in ("layerwise", "stagewise"))
        assert (larger <= smaller * (1 + 1e-9)).all()


def test_the_bound_meets_the_optimum_where_one_strategy_is_best_in_everything() -> None:
    table = random_table(5, pp=1, num_choices=1, num_layouts=1, num_outer=1, tightness=50.0)
    best = brute_force([table], "layerwise")
    # one strategy, one layout, one stage: nothing is relaxed
    assert float(outer_lower_bounds(table)[0]) == pytest.approx(best.cost, rel=1e-9)


def test_layers_that_may_lie_anywhere_cost_their_sum_and_the_larger_of_mean_and_longest() -> None:
    seconds, sync, once = (
        torch.tensor([row]) for row in ([1.0, 3.0, 1.5], [0.5, 0.1, 0.2], [0.3, 0.2, 0.1])
    )
    # two stages, four micro-batches: 5.5 + 3 * max(5.5 / 2, 3) + max(0.8 / 2, 0.5) + 0.6
    assert spread_bounds(seconds, sync, once, torch.tensor([4.0]), 2).tolist() == pytest.approx(
        [15.6]
    )


def test_the_default_problem_is_bounded_within_two_percent() -> None:
    problem = load_problem(["model=gpt2_xl", "training=gpt2_xl"])
    bounds = [outer_lower_bounds(table) for table in build_tables(problem)]
    lowest = float(torch.cat(bounds).min())
    best = check(problem, "exhaustive").iteration_time_s
    assert best * 0.98 <= lowest <= best


def test_prices_are_the_breakpoints_of_the_lower_hull() -> None:
    value = torch.tensor([[1.0, 2.0, 5.0, 6.0]], dtype=torch.float64).numpy()
    memory = torch.tensor([[10.0, 8.0, 7.0, 2.0]], dtype=torch.float64).numpy()
    # from (10, 1) to (8, 2) at 1/2, from (8, 2) to (2, 6) at 4/6; (7, 5) lies above the hull
    assert price_grid(value, memory).tolist() == pytest.approx([0.0, 0.5, 4.0 / 6.0])


def test_a_segment_fits_where_some_strategies_of_its_layers_do() -> None:
    met = set()
    for seed in range(40):
        table = small_table(seed)
        for costs in (OuterCosts.read(table, outer) for outer in range(table.num_outer)):
            grid = SegmentGrid.build(costs, "layerwise")
            signatures, _ = costs.stage_signatures
            for s, (kind, in_flight, capacity) in enumerate(signatures):
                legal = np.flatnonzero(costs.kind_allowed[kind])
                kept = (costs.static + in_flight * costs.activation)[:, legal]
                for first, end in combinations(range(costs.num_layers + 1), 2):
                    fewest = min(
                        kept[range(first, end), chosen].sum()
                        + costs.working[range(first, end), legal[list(chosen)]].max()
                        for chosen in product(range(len(legal)), repeat=end - first)
                    )
                    fits = bool(grid._fits[s, grid.distinct.number[first, end]])
                    assert fits == (fewest <= capacity * (1 + 1e-12))
                    met.add(fits)
    assert met == {True, False}


@pytest.mark.parametrize("mode", ["stagewise", "layerwise"])
def test_a_stage_is_bounded_by_the_strategies_that_it_runs(mode: str) -> None:
    compared = 0
    for seed in range(0, 30, 3):
        table = random_table(seed, pp=2, num_layers=6, num_choices=4, tightness=3.0)
        for costs in (OuterCosts.read(table, outer) for outer in range(table.num_outer)):
            refused = ~costs.kind_allowed[:, None, :]
            every = np.ones_like(costs.kind_allowed)
            expensive = replace(costs, kind_allowed=every, time=costs.time + 1e6 * refused)
            grids = [SegmentGrid.build(own, mode) for own in (costs, expensive)]
            own, other = (grid.lower_bounds(time=1.0) for grid in grids)
            # where every strategy that fits is refused, both bounds are large
            runs = np.isfinite(own) & (other < 1e5)
            np.testing.assert_allclose(own[runs], other[runs], rtol=1e-9)
            compared += int(refused.any()) * int(runs.sum())
    assert compared > 50
