"""Rounded plans made to fit: left memory is used, strategies are chosen again under prices of bytes."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.config import SearchConfig
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.gradient.relaxed_cost import RelaxedPlans
from darts_parallel.gradient.restarts import KeptRestarts, RestartBatch
from darts_parallel.gradient.rounding import (
    fill,
    fit,
    harden,
    layer_kinds,
    repair,
    round_counts,
    with_moved_boundaries,
)
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table


def layer_seconds(table: CostTable, plans: HardPlans) -> torch.Tensor:
    """Seconds per iteration that single layers take, `(B, L)`."""
    rows, layers, kinds = plans.outer.unsqueeze(1), torch.arange(table.num_layers), plans.stages()
    place = (rows, table.stage_kind[kinds], layers, plans.choices)
    once = table.per_iteration[rows, layers, plans.choices]
    return table.num_micro_batches[rows] * table.time[place] + table.sync[place] + once


def test_boundaries_move_by_a_layer_alone_or_together_and_leave_every_stage_one() -> None:
    table = random_table(0, pp=3, num_layers=5)
    free = replace(table, fused_to_previous=torch.zeros(5, dtype=torch.bool))
    plan = HardPlans.one(0, [0] * 5, [0, 1, 3])
    moved = with_moved_boundaries(free, plan).first_layers.tolist()
    assert sorted(moved) == [[0, 1, 2], [0, 1, 4], [0, 2, 3], [0, 2, 4]]
    alone = with_moved_boundaries(free, plan, most=1).first_layers.tolist()
    assert sorted(alone) == [[0, 1, 2], [0, 1, 4], [0, 2, 3]]
    fused = replace(free, fused_to_previous=torch.arange(5) == 4)
    assert sorted(with_moved_boundaries(fused, plan).first_layers.tolist()) == [
        [0, 1, 2],
        [0, 2, 3],
    ]


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
            pool.add(0, plans, torch.zeros(12, dtype=torch.float64), fitting=fitting)
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


def alike(table: CostTable) -> CostTable:
    """Return the table with all layers like the first, and every strategy allowed everywhere."""

    def same(values: torch.Tensor) -> torch.Tensor:
        return values[..., :1, :].expand_as(values).contiguous()

    names = ("forward", "backward", "weight_gradient", "sync", "per_iteration")
    names = (*names, "static", "activation", "working")
    fields = {name: same(getattr(table, name)) for name in names}
    allowed = torch.ones_like(table.allowed)
    return replace(table, allowed=allowed, kind_allowed=None, **fields)


def rounded(weights: torch.Tensor, edges: torch.Tensor, table: CostTable) -> HardPlans:
    return round_counts(weights.flatten(0, 1), harden(weights, edges, table), table)


def test_equal_layers_of_a_stage_share_their_expected_counts() -> None:
    table = alike(random_table(0, pp=2, num_layers=12, num_choices=3, num_outer=1))
    shares = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    weights = shares.expand(1, 2, 12, 3)
    edges = torch.tensor([[[8.0], [5.2]]], dtype=torch.float64)
    first, second = rounded(weights, edges, table).choices.tolist()
    counts = [[part.count(choice) for choice in range(3)] for part in (first[:8], first[8:])]
    assert counts == [[5, 3, 0], [2, 2, 0]]
    assert [second[:5].count(choice) for choice in range(3)] == [3, 2, 0]


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_the_largest_remainder(seed: int) -> None:
    table = random_table(seed, pp=3, num_layers=9, num_choices=4, num_outer=2)
    table = alike(table) if seed % 2 else table
    rng = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 3, 9, 4, generator=rng, dtype=torch.float64)
    weights = logits.masked_fill(~table.allowed[:, None, None], -torch.inf).softmax(-1)
    edges = 9 * torch.rand(2, 3, 2, generator=rng, dtype=torch.float64).sort(-1).values
    plans = rounded(weights, edges, table)
    kinds, stages = layer_kinds(table), plans.stages()
    assert len(set(kinds.tolist())) == (1 if seed % 2 else 9)
    for row, given in enumerate(weights.flatten(0, 1)):
        for stage in range(3):
            for kind in set(kinds.tolist()):
                members = (stages[row] == stage) & (kinds == kind)
                possible = given[members]
                if table.kind_allowed is not None:
                    runs = table.kind_allowed[table.stage_kind[stage]]
                    possible = possible * runs
                    possible = possible / possible.sum(-1, keepdim=True)
                expected = possible.sum(0)
                found = torch.bincount(plans.choices[row][members], minlength=4)
                assert int(found.sum()) == int(members.sum())
                assert bool(((found - expected).abs() < 1.0 + 1e-6).all())
                up = found > expected
                if bool(up.any()) and bool((~up).any()):
                    rest = expected - expected.floor()
                    assert float(rest[up].min()) >= float(rest[~up].max()) - 1e-6


def test_recomputed_layers_come_first_in_a_stage() -> None:
    table = alike(random_table(1, pp=2, num_layers=8, num_choices=3, num_outer=1))
    kinds = ("none", "full", "selective")
    pairs = zip(table.choices, kinds, strict=True)
    choices = tuple(replace(choice, recompute=kind) for choice, kind in pairs)
    table = replace(table, choices=choices)
    weights = torch.full((1, 1, 8, 3), 1 / 3, dtype=torch.float64)
    plan = rounded(weights, torch.tensor([[[5.0]]], dtype=torch.float64), table)
    names = [kinds[choice] for choice in plan.choices[0].tolist()]
    order = ["full", "selective", "none"]
    for part in (names[:5], names[5:]):
        assert part == sorted(part, key=order.index)
        assert set(part) == set(order)


def test_the_average_of_a_restart_that_changes_its_mind_is_a_mixture() -> None:
    table = alike(random_table(2, pp=2, num_layers=8, num_choices=2, num_outer=1))
    rng = torch.Generator().manual_seed(0)
    config = SearchConfig(num_restarts=1)
    batch = RestartBatch.initial(table, "layerwise", config, rng, 0, torch.tensor([0]))
    for step in range(400):
        one = torch.tensor([1.0, 0.0] if step % 4 else [0.0, 1.0], dtype=torch.float64)
        weights = one.expand(1, 1, 8, 2)
        stages = torch.ones(1, 1, 8, 2, dtype=torch.float64) / 2
        batch.remember(RelaxedPlans(weights, stages), step + 1)
    batch = batch.select(KeptRestarts(0, torch.tensor([0]), torch.tensor([[0]])))
    plan = batch.average_plans()
    stages, choices = plan.stages()[0], plan.choices[0]
    for stage in range(2):
        own = choices[stages == stage]
        assert int((own == 0).sum()) == round(0.75 * len(own))
        assert int((own == 1).sum()) > 0


def test_a_plan_that_rounding_puts_above_its_devices_is_not_repaired() -> None:
    table = random_table(3, pp=2, num_layers=6, num_choices=5)
    plans = random_plans(table, 1, torch.Generator().manual_seed(3))
    memory = evaluate_batch(table, plans).memory[0]
    table = replace(table, capacity=memory * (1.0 - 1e-12))
    fixed, cost = repair(table, plans, float("inf"))
    assert bool(cost.feasible[0])
    assert bool((cost.memory[0] > table.capacity).any())
    assert fixed.choices.equal(plans.choices)
