"""The plans that need the least memory."""

from bisect import bisect_right
from itertools import product

import torch
from torch import Tensor

from darts_parallel.cost.cost_table import CostTable, Tables
from darts_parallel.cost.hard_plans import HardPlans, unit_starts
from darts_parallel.cost.host_memory import without_offloadable_memory
from darts_parallel.cost.pipeline import summed
from darts_parallel.cost.rows import flatnonzero
from darts_parallel.cost.stage_costs import kept_bytes

BISECTIONS = 30
"""Halvings of the share of capacity that stages fill: to 1e-9 of it."""


def lightest_plans(tables: Tables, space_kind: str) -> list[HardPlans]:
    """Return for every outer choice plans of nearly the smallest peak memory.

    Layer-wise, each layer takes its lightest strategy for its stage. Uniform, all layers share the
    strategy that is lightest in sum. Stage-wise there are both the uniform plan and one in which the
    layers of a stage share a strategy. Stages are filled to an equal share of their capacity, found by
    bisection.

    A stage needs the working bytes of its largest layer alone. There is a plan in which half of those
    of each layer count, and one in which an average layer counts once: ZeRO-3 gathers alike layers.
    """
    kinds = ("uniform", "stagewise") if space_kind == "stagewise" else (space_kind,)
    free = [without_offloadable_memory(table) for table in tables]
    return [HardPlans.concatenate([_lightest(table, kind) for kind in kinds]) for table in free]


def _lightest(table: CostTable, space_kind: str) -> HardPlans:
    units = unit_starts(table.fused_to_previous)
    unit = (~table.fused_to_previous).cumsum(0) - 1
    layers = torch.arange(table.num_layers)
    legal = table.runnable
    if space_kind == "uniform":
        legal = legal.all(0, keepdim=True)
    plans = []
    # of the working bytes that count: a stage needs them of its largest layer alone
    shares = (0.5, table.num_stages / table.num_layers)
    outers = flatnonzero(table.allowed.any(1))
    for outer, share in product(outers.tolist(), shares):
        in_flight = table.in_flight[outer].view(-1, 1, 1)
        needed = kept_bytes(table.static[outer], table.activation[outer], in_flight)
        needed = needed + share * table.working[outer]
        illegal = ~(table.allowed[outer] & legal).unsqueeze(1)
        needed = needed.masked_fill(illegal, torch.inf)
        if space_kind == "layerwise":
            size, choice = needed.min(-1)
        else:
            sums = needed.sum(1, keepdim=True)
            if space_kind == "uniform":
                sums = sums.sum(0, keepdim=True)
            choice = sums.argmin(-1).expand(needed.shape[:-1])
            size = needed.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        of_units = summed(size, unit.expand_as(size), len(units))
        starts = units[_fill(of_units, table.stage_capacity)]
        stages = torch.searchsorted(starts, layers, right=True) - 1
        chosen = choice[stages, layers]
        plans.append(HardPlans(torch.tensor([outer]), chosen.unsqueeze(0), starts.unsqueeze(0)))
    return HardPlans.concatenate(plans)


def _fill(size: Tensor, capacity: Tensor) -> Tensor:
    """Return the stage starts that fill every stage to about the same share of its capacity, `(K,)`."""
    num_stages = len(size)
    prefix = torch.nn.functional.pad(size.cumsum(1), (1, 0)).tolist()
    available = capacity.abs().clamp(min=1.0).tolist()
    low = 0.0
    high = max(sums[-1] / bytes_ for sums, bytes_ in zip(prefix, available, strict=True))
    starts = list(range(num_stages))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        trial = _filled_below(prefix, [middle * own for own in available])
        if trial is None:
            low = middle
        else:
            high = middle
            starts = trial
    return torch.tensor(starts)


def _filled_below(prefix: list[list[float]], limits: list[float]) -> list[int] | None:
    """Return stage starts with every stage within its limit of bytes; None if there are none.

    Every stage takes as many units as fit. If the next stage then holds no further unit, it must
    end there, and every stage before it earlier.
    """
    units = len(prefix[0]) - 1
    latest = list(range(units - len(prefix) + 1, units + 1))
    while True:
        starts = [0]
        for sums, limit, last in zip(prefix, limits, latest, strict=True):
            position = starts[-1]
            end = min(bisect_right(sums, sums[position] + limit) - 1, last)
            if end == position:
                break
            starts.append(end)
        else:
            return starts[:-1] if starts[-1] == units else None
        stage = len(starts) - 1
        if position == stage:
            return None
        latest[:stage] = map(min, latest, range(position - stage, position))
