"""Random legal hard plans of a cost table."""

import torch

from darts_parallel.cost.hard_plans import HardPlans, unit_starts
from darts_parallel.cost.table import CostTable


def random_plans(table: CostTable, count: int, rng: torch.Generator) -> HardPlans:
    """`count` plans of every outer choice in turn: random strategies, random stage starts."""
    units = unit_starts(table.fused_to_previous)
    outer = torch.arange(count) % table.num_outer
    starts = []
    for _ in range(count):
        inner = torch.randperm(len(units) - 1, generator=rng)[: table.num_stages - 1].sort().values + 1
        starts.append(units[torch.cat([torch.zeros(1, dtype=torch.long), inner])])
    weights = table.allowed[outer].double()
    choices = torch.multinomial(weights, table.num_layers, replacement=True, generator=rng)
    return HardPlans(outer, choices, torch.stack(starts))
