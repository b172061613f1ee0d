from dataclasses import replace
from itertools import product

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.chain.rounding import best_paths, stage_prices
from darts_parallel.gradient.descent import search_tables
from darts_parallel.gradient.relaxed_cost import SurrogateCost
from tests.support.random_tables import random_table


def price(table: CostTable, plans: HardPlans, slope: torch.Tensor, price: torch.Tensor) -> torch.Tensor:
    """What a chain's path costs, layer by layer, in plain Python, `(B,)`."""
    totals = []
    for row in range(len(plans)):
        outer, stages, total = int(plans.outer[row]), plans.stages()[row].tolist(), 0.0
        for layer, choice in enumerate(plans.choices[row].tolist()):
            stage = stages[layer]
            kind = int(table.stage_kind[stage])
            total += float(slope[row, stage] * table.time[outer, kind, layer, choice])
            total += float(table.sync[outer, kind, layer, choice]) / table.pp
            total += float(table.per_iteration[outer, layer, choice])
            held = table.static[outer, layer, choice]
            held = held + table.in_flight[outer, stage] * table.activation[outer, layer, choice]
            total += float(price[row, stage] * held)
            if layer:
                a, b = (int(table.layout[c]) for c in plans.choices[row, layer - 1 : layer + 1])
                if stages[layer - 1] == stage:
                    change = table.reshard[outer, kind, layer - 1, a, b]
                else:
                    change = table.p2p[outer, int(table.boundary_kind[stage - 1]), layer - 1, a, b]
                total += float(slope[row, stage] * change)
        totals.append(total)
    return torch.tensor(totals, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_strategies_cost_less_under_the_prices(seed: int) -> None:
    table = random_table(seed, num_layers=4, num_outer=1)
    table = replace(table, allowed=torch.ones_like(table.allowed))
    generator = torch.Generator().manual_seed(seed)
    slope, cents = (torch.rand(1, table.pp, generator=generator, dtype=torch.float64) for _ in range(2))
    plan = HardPlans(
        torch.zeros(1, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long), torch.tensor([[0, 2]])
    )
    best = best_paths(plan, table, slope, cents)
    every = torch.tensor(list(product(range(3), repeat=4)))
    count = len(every)
    others = HardPlans(plan.outer.expand(count), every, plan.first_layers.expand(count, -1))
    runs = table.runs(table.stage_kind[others.stages()], every).all(1)
    values = price(table, others, slope.expand(count, -1), cents.expand(count, -1))[runs]
    assert price(table, best, slope, cents)[0] == pytest.approx(float(values.min()), rel=1e-12)
    assert best.first_layers.equal(plan.first_layers)


def test_the_slowest_stage_counts_for_every_micro_batch_and_memory_costs_where_it_is_short() -> None:
    table = random_table(0, num_outer=1)
    count = float(table.num_micro_batches[0])
    seconds = torch.tensor([[[1.0, 3.0]]], dtype=torch.float64)
    memory = table.capacity * torch.tensor([[[0.5, 1.1]]], dtype=torch.float64)
    total = torch.tensor([[10.0]], dtype=torch.float64)
    cost = SurrogateCost(total, seconds, memory, total, table.capacity)
    slope, cents = stage_prices(cost, table, torch.zeros(1, 1, 2), penalty=10.0, sharpness=1000.0)
    assert slope.flatten().tolist() == pytest.approx([1.0, count])
    assert cents[0, 0, 0] == 0
    assert float(cents[0, 0, 1]) == pytest.approx(10.0 * 1.0 / float(table.capacity[1]))


@pytest.mark.parametrize("rounding", ["argmax", "chain", "both"])
def test_either_rounding_finds_plans_that_fit(rounding: str) -> None:
    tables = [random_table(7, tightness=0.8)]
    config = SearchConfig(num_steps=20, num_restarts=4, rounding=rounding)
    result = search_tables(tables, "layerwise", config, seed=0)
    assert result is not None
    assert result.raw_iteration_time_s >= result.iteration_time_s
