"""Rounded plans made to fit: left memory is used, strategies are chosen again under prices of bytes."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.gradient.pool import PlanPool, TablePlans
from darts_parallel.gradient.rounding import fill, fit
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table


def layer_seconds(table: CostTable, plans: HardPlans) -> torch.Tensor:
    """Seconds per iteration that single layers take, `(B, L)`."""
    rows, layers, kinds = plans.outer.unsqueeze(1), torch.arange(table.num_layers), plans.stages()
    place = (rows, table.stage_kind[kinds], layers, plans.choices)
    once = table.per_iteration[rows, layers, plans.choices]
    return table.num_micro_batches[rows] * table.time[place] + table.sync[place] + once


@pytest.mark.parametrize("seed", range(8))
def test_filled_plans_are_faster_by_layers_keep_layouts_and_fit_where_they_did(seed: int) -> None:
    table = random_table(seed, pp=2, num_layers=6, num_choices=5, num_layouts=2, tightness=0.8)
    plans = random_plans(table, 12, torch.Generator().manual_seed(seed))
    filled = fill(table, plans)
    before, after = evaluate_batch(table, plans), evaluate_batch(table, filled)
    assert bool((after.feasible | ~before.feasible).all())
    assert bool((layer_seconds(table, filled) <= layer_seconds(table, plans)).all())
    assert table.layout[filled.choices].equal(table.layout[plans.choices])
    assert filled.first_layers.equal(plans.first_layers)


def test_nothing_faster_fits_into_a_filled_plan() -> None:
    changed = 0
    for seed in range(6):
        table = replace(
            random_table(seed, pp=2, num_layers=5, num_choices=4, num_layouts=1), kind_allowed=None
        )
        table = replace(table, working=torch.zeros_like(table.working))
        plans = random_plans(table, 6, torch.Generator().manual_seed(seed))
        plans = plans[torch.nonzero(evaluate_batch(table, plans).feasible).flatten()]
        filled = fill(table, plans)
        changed += int((filled.choices != plans.choices).any(1).sum())
        for layer in range(table.num_layers):
            for choice in range(len(table.choices)):
                choices = filled.choices.clone()
                choices[:, layer] = choice
                other = replace(filled, choices=choices)
                faster = layer_seconds(table, other) < layer_seconds(table, filled) * (1 - 1e-6)
                legal = table.allowed[filled.outer, choice]
                assert not bool(
                    (faster[:, layer] & legal & evaluate_batch(table, other).feasible).any()
                )
    assert changed


def test_equal_layers_get_unequal_strategies_where_memory_is_left_for_some() -> None:
    table = random_table(0, pp=1, num_layers=4, num_choices=2, num_layouts=1, num_outer=1)
    ones = torch.ones(1, 4, 2, dtype=torch.float64)
    light = torch.tensor([2.0, 1.0], dtype=torch.float64)
    forward = (1.0 / light * ones).unsqueeze(1).expand_as(table.forward)
    table = replace(
        table, allowed=ones[:, 0] > 0, kind_allowed=None, forward=forward, static=light * ones
    )
    table = replace(table, activation=0 * ones, working=0 * ones, per_iteration=0 * ones)
    table = replace(table, backward=0 * table.backward, sync=0 * table.sync)
    table = replace(table, capacity=torch.tensor([6.5], dtype=torch.float64))
    lean = HardPlans(torch.tensor([0]), torch.tensor([[1, 1, 1, 1]]), torch.tensor([[0]]))
    for plan in (fill(table, lean), fill(table, fit(table, lean))):
        assert sorted(plan.choices[0].tolist()) == [0, 0, 1, 1]


def test_strategies_under_prices_are_the_fastest_where_memory_is_free_and_fit_where_any_do() -> (
    None
):
    for seed in range(6):
        table = random_table(seed, pp=2, num_layers=6, num_choices=5, num_layouts=1, tightness=0.5)
        table = replace(table, kind_allowed=None, working=torch.zeros_like(table.working))
        plans = random_plans(table, 8, torch.Generator().manual_seed(seed))
        rows, kinds, layers = (
            plans.outer.unsqueeze(1),
            table.stage_kind[plans.stages()],
            torch.arange(6),
        )
        barred = ~table.allowed[plans.outer].unsqueeze(1)
        flight = table.in_flight[rows, plans.stages()].unsqueeze(-1)
        held = table.static[plans.outer] + flight * table.activation[plans.outer]
        seconds = table.num_micro_batches[rows].unsqueeze(-1) * table.time[rows, kinds, layers]
        seconds = seconds + table.sync[rows, kinds, layers] + table.per_iteration[plans.outer]
        free = replace(table, capacity=1e6 * table.capacity)
        assert fit(free, plans).choices.equal(seconds.masked_fill(barred, torch.inf).argmin(-1))
        lightest = replace(plans, choices=held.masked_fill(barred, torch.inf).argmin(-1))
        possible = evaluate_batch(table, lightest).feasible
        assert bool((evaluate_batch(table, fit(table, plans)).feasible == possible).all())


def test_a_pool_keeps_what_fitting_finds() -> None:
    best = {}
    for fitting in ("repair", "fill", "prices", "splits"):
        for seed in range(6):
            table = random_table(seed, pp=2, num_layers=6, num_choices=5)
            pool = PlanPool([table], "layerwise")
            plans = random_plans(table, 12, torch.Generator().manual_seed(seed))
            pool.add(TablePlans(0, plans), torch.zeros(12, dtype=torch.float64), fitting=fitting)
            best[fitting, seed] = pool.best_time
    for seed in range(6):
        assert (
            best["splits", seed]
            <= best["prices", seed]
            <= best["fill", seed]
            <= best["repair", seed]
        )
    assert sum(best["prices", seed] < best["repair", seed] for seed in range(6)) >= 2
    assert any(best["splits", seed] < best["prices", seed] for seed in range(6))
