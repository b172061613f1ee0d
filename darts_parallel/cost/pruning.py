"""Equal names for equal things: strategies that change nothing for a layer follow the other layers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.rows import flatnonzero
from darts_parallel.plans import LayerStrategy

MAX_COMPARISONS = 1 << 24
"""Comparisons that are made at once; they bound the memory."""
Kind = Callable[[LayerStrategy], object]
"""Strategies of one kind alone are compared."""


def canonical(table: CostTable, plan: HardPlans) -> HardPlans:
    """Return the plan with every layer on the most common strategy that costs it exactly the same.

    Recomputation does not change an embedding, nor a ZeRO stage the loss: a search leaves them at
    random. The true cost does not change.
    """
    if table.own is not None:
        return plan  # the term may tell strategies apart that cost the same without it
    outer = int(plan.outer[0])
    choices = plan.choices[0]
    common = [choice for choice, _ in Counter(choices.tolist()).most_common()]
    unused = [choice for choice in range(len(table.choices)) if choice not in common]
    order = torch.tensor(common + unused)
    costs = compared_costs(table)
    host = table.host
    if host is not None:
        costs += [host.transfer, host.state_transfer, host.state]
    shape = (-1, table.num_layers, len(table.choices))
    figures = torch.cat([values[outer].reshape(shape) for values in costs])
    own = figures[:, torch.arange(len(choices)), choices].unsqueeze(-1)
    same_layout = table.layout == table.layout[choices].unsqueeze(1)
    alike = (figures == own).all(0) & same_layout & table.allowed[outer]
    result = order[alike[:, order].to(torch.uint8).argmax(1)]
    return HardPlans(plan.outer, result.unsqueeze(0), plan.first_layers)


def compared_costs(table: CostTable) -> list[torch.Tensor]:
    """Return the seconds and bytes by which layers, or strategies, cost the same."""
    return [
        table.forward,
        table.backward,
        table.sync,
        table.per_iteration,
        table.static,
        table.activation,
        table.working,
    ]


def without_needless_simulation(table: CostTable) -> CostTable:
    """Return the table with the closed form in place of the simulation of a single stage.

    Every schedule of one stage takes the seconds of its micro-batches one after the other.
    """
    if not table.simulated or table.num_stages > 1:
        return table
    return replace(table, pipeline=replace(table.pipeline, simulated=False))


def without_dominated(table: CostTable, kind: Kind = lambda strategy: None) -> CostTable:
    """Return the table without strategies that another one beats or equals in everything.

    A strategy is dominated if another one of the same layout and kind needs no more seconds and no more
    bytes, for every layer, stage and outer choice; of equal ones the first is kept. No optimum is
    lost: the other strategy can take its place in any plan of any space. Synchronisation may be
    longer by the seconds that the micro-batch is shorter (a shorter backward hides less of it): the
    sum over stages falls by as much as the largest synchronisation rises at most.
    """
    # offloading trades memory for seconds, and an own term may prefer any strategy
    if table.host is not None or table.own is not None:
        return table
    legal = [table.allowed]
    if table.kind_allowed is not None:
        legal.append(table.kind_allowed)
    # strategies that are not allowed count as expensive
    rows = [(~allowed).to(torch.float64) for allowed in legal]
    rows += [_distinct_layers(values).flatten(0, -2) for values in _figures(table)]
    dominated = torch.zeros(len(table.choices), dtype=torch.bool)
    groups = defaultdict[object, list[int]](list)
    for index, strategy in enumerate(table.choices):
        groups[int(table.layout[index]), kind(strategy)].append(index)
    for own in groups.values():
        members = torch.tensor(own)
        dominated[members] = _dominated([values[:, members] for values in rows])
    if not bool(dominated.any()):
        return table
    return table.keep_choices(flatnonzero(~dominated))


def _figures(table: CostTable) -> list[torch.Tensor]:
    """Return the seconds and bytes in which a dominating strategy must be no worse."""
    if table.simulated or table.virtual_stages > 1:
        # the longest path may take any of the passes alone
        seconds = [
            table.forward,
            table.backward - table.weight_gradient,
            table.weight_gradient,
            table.sync,
        ]
    else:
        seconds = [table.time, table.time + table.sync]
    return [*seconds, table.per_iteration, table.static, table.activation, table.working]


def _distinct_layers(values: torch.Tensor) -> torch.Tensor:
    """Return costs `(..., L, C)` without the layers that equal the layer before them, as most blocks do."""
    unequal = values[..., 1:, :] != values[..., :-1, :]
    differs = unequal.flatten(0, -3).any(0).any(-1)
    first = torch.ones(1, dtype=torch.bool)
    return values[..., torch.cat([first, differs]), :]


def _dominated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the columns that another one beats or equals in every row; of equal ones not the first.

    Args:
        parts: Each `(N, C)`.
    """
    size = parts[0].shape[1]
    columns = torch.arange(size)
    left = columns.repeat_interleave(size)
    right = columns.repeat(size)
    for part in parts:
        for chunk in torch.split(part, max(MAX_COMPARISONS // max(len(left), 1), 1)):
            keep = (chunk[:, right] <= chunk[:, left]).all(0)
            left = left[keep]
            right = right[keep]
    beats = torch.zeros(size, size, dtype=torch.bool)  # [a, b]: b is no worse than a
    beats[left, right] = True
    earlier = columns.unsqueeze(0) < columns.unsqueeze(1)
    return (beats & (~beats.T | earlier)).any(1)
