"""Equal names for equal things: strategies that change nothing for a layer follow the other layers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans

PAIRS = 1 << 24
"""Comparisons that are made at once."""


def canonical(table: CostTable, plan: HardPlans) -> HardPlans:
    """Return the plan with every layer on the most common strategy that costs it exactly the same.

    Recomputation means nothing to an embedding, nor a ZeRO stage to the loss: a search leaves them at
    random. The true cost does not change.
    """
    outer, choices = int(plan.outer[0]), plan.choices[0].tolist()
    common = [choice for choice, _ in Counter(choices).most_common()]
    order = torch.tensor(common + [c for c in range(len(table.choices)) if c not in common])
    alike = _costs_like(table, outer, plan.choices[0]) & table.allowed[outer]
    result = order[alike[:, order].to(torch.uint8).argmax(1)]
    return HardPlans(plan.outer, result.unsqueeze(0), plan.first_layers)


def _costs_like(table: CostTable, outer: int, choices: torch.Tensor) -> torch.Tensor:
    """Return strategies of the layout and the costs of every layer's own `(L,)`, shape `(L, C)`."""
    costs = [
        table.forward,
        table.backward,
        table.sync,
        table.per_iteration,
        table.static,
        table.activation,
    ]
    if (host := table.host) is not None:
        costs += [host.transfer, host.state_transfer, host.state]
    shape = (-1, table.num_layers, len(table.choices))
    figures = torch.cat([values[outer].reshape(shape) for values in (*costs, table.working)])
    own = figures[:, torch.arange(len(choices)), choices].unsqueeze(-1)
    return (figures == own).all(0) & (table.layout == table.layout[choices].unsqueeze(1))


def without_needless_simulation(table: CostTable) -> CostTable:
    """Return the table with the closed form in place of the simulation of a single stage.

    Every schedule of one stage takes the seconds of its micro-batches one after the other.
    """
    if not table.pipeline.simulated or table.num_stages > 1:
        return table
    return replace(table, pipeline=replace(table.pipeline, simulated=False))


def without_dominated(table: CostTable) -> CostTable:
    """Return the table without strategies that another one beats or equals in everything.

    A strategy is dominated where one of the same layout needs no more seconds and no more bytes, for
    every layer, stage and outer choice; of equal ones the first is kept. No optimum is lost: the
    other can take its place in any plan of any space. Synchronisation may be longer by what the
    micro-batch is shorter (a shorter backward hides less of it): the sum over stages loses the one,
    the largest synchronisation gains at most the other.
    """
    if table.host is not None:
        return table  # less memory at more seconds of transfer: nothing is dominated in everything
    if table.pipeline.simulated or table.virtual_stages > 1:
        # a longest path falls with each pass by itself
        seconds = [
            table.forward,
            table.backward - table.weight_gradient,
            table.weight_gradient,
            table.sync,
        ]
    else:
        seconds = [table.time, table.time + table.sync]
    figures = [*seconds, table.per_iteration, table.static, table.activation, table.working]
    rows = [_distinct_layers(values).flatten(0, -2) for values in figures]
    dominated = torch.zeros(len(table.choices), dtype=torch.bool)
    for layout in torch.unique(table.layout):
        mine = torch.nonzero(table.layout == layout).squeeze(1)
        legal = [table.allowed[:, mine]]
        legal += [] if table.kind_allowed is None else [table.kind_allowed[:, mine]]
        # strategies that are not allowed count as expensive
        barred = [(~allowed).to(torch.float64) for allowed in legal]
        dominated[mine] = _dominated([*barred, *(values[:, mine] for values in rows)])
    return (
        table.keep_choices(torch.nonzero(~dominated).squeeze(1)) if bool(dominated.any()) else table
    )


def _distinct_layers(values: torch.Tensor) -> torch.Tensor:
    """Return figures `(..., L, C)` without the layers that equal the one before them: most blocks do."""
    differs = (values[..., 1:, :] != values[..., :-1, :]).flatten(0, -3).any(0).any(-1)
    return values[..., torch.cat([torch.ones(1, dtype=torch.bool), differs]), :]


def _dominated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the columns that another one beats or equals in every row; of equal ones not the first.

    Args:
        parts: Each `(N, C)`. Few pairs outlive the first rows, so that only those are compared further.
    """
    size = parts[0].shape[1]
    places = torch.arange(size)
    left, right = (index.flatten() for index in torch.meshgrid(places, places, indexing="ij"))
    for part in parts:
        # a few rows that differ from each other
        for row in sorted({0, len(part) // 2, len(part) - 1}):
            keep = part[row, right] <= part[row, left]
            left, right = left[keep], right[keep]
    for part in parts:
        for chunk in torch.split(part, max(PAIRS // max(len(left), 1), 1)):
            keep = (chunk[:, right] <= chunk[:, left]).all(0)
            left, right = left[keep], right[keep]
    beats = torch.zeros(size, size, dtype=torch.bool)  # [a, b]: b is no worse than a
    beats[left, right] = True
    earlier = torch.arange(size).unsqueeze(0) < torch.arange(size).unsqueeze(1)
    return (beats & (~beats.T | earlier)).any(1)
