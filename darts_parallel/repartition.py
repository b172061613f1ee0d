"""Exact stage edges for given strategies: the smallest `sum + (m - 1) max` of stage seconds that fits.

A dynamic program over (stage, layer) for the smallest sum under a limit on the slowest stage, with a
bisection on the limit (the linear partition problem, as PipeDream and DAPPLE use it).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import HardPlans
from darts_parallel.table import CostTable

Array = NDArray[np.float64]
LIMITS_ABOVE = 8
"""Limits above the smallest feasible one that are tried: a slower bottleneck may have a smaller sum."""


def repartitioned(table: CostTable, plan: HardPlans) -> HardPlans:
    """The plan with other edges: the best for its strategies under several limits.

    Synchronisation is left out of the program; the caller evaluates what comes back.
    """
    if table.pp == 1:
        return plan
    seconds = _segment_seconds(table, plan)
    legal = _segments_that_fit(table, plan)
    seconds = np.where(legal, seconds, np.inf)
    limits = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, len(limits) - 1
    if high < 0 or _edges(seconds, limits[high]) is None:
        return plan
    while low < high:
        middle = (low + high) // 2
        if _edges(seconds, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = [_edges(seconds, limits[i]) for i in range(low, min(low + LIMITS_ABOVE, len(limits)))]
    starts = torch.tensor([edges for edges in found if edges is not None])
    return HardPlans(plan.outer.expand(len(starts)), plan.choices.expand(len(starts), -1), starts)


def _segment_seconds(table: CostTable, plan: HardPlans) -> Array:
    """Seconds of layers i to j - 1 as stage k, shape `(K, L + 1, L + 1)`."""
    outer, layers = int(plan.outer[0]), torch.arange(table.num_layers)
    choices = plan.choices[0]
    layout = table.layout[choices]
    result = np.full((table.pp, table.num_layers + 1, table.num_layers + 1), np.inf)
    for kind in sorted(set(table.stage_kind.tolist())):
        own = table.time[outer, kind, layers, choices].numpy()
        change = table.reshard[outer, kind, layers[:-1], layout[:-1], layout[1:]].numpy()
        prefix = np.concatenate([[0.0], np.cumsum(own)])
        changes = np.concatenate([[0.0, 0.0], np.cumsum(change)])
        block = prefix[None, :] - prefix[:, None]
        inner = np.zeros_like(block)
        inner[:-1, :] = changes[None, :] - changes[1:, None]
        for stage in torch.nonzero(table.stage_kind == kind).flatten().tolist():
            result[stage] = block + inner
            if stage:
                border = int(table.boundary_kind[stage - 1])
                entry = table.p2p[outer, border, layers[:-1], layout[:-1], layout[1:]].numpy()
                result[stage, 1:-1] += entry[:, None]
    return result


def _segments_that_fit(table: CostTable, plan: HardPlans) -> NDArray[np.bool_]:
    """Non-empty segments that fit their stage and do not begin with a joined layer."""
    outer, layers, choices = int(plan.outer[0]), torch.arange(table.num_layers), plan.choices[0]
    static = table.static[outer, layers, choices].numpy()
    activation = table.activation[outer, layers, choices].numpy()
    working = table.working[outer, layers, choices].numpy()
    count = table.num_layers
    largest = np.zeros((count + 1, count + 1))
    for first in range(count):
        largest[first, first + 1 :] = np.maximum.accumulate(working[first:])
    rows = []
    for stage in range(table.pp):
        kept = np.concatenate([[0.0], np.cumsum(static + float(table.in_flight[outer, stage]) * activation)])
        rows.append(kept[None, :] - kept[:, None] + largest <= float(table.capacity[stage]))
    fits = np.stack(rows)
    fits[:, np.flatnonzero(table.joined.numpy())] = False
    return np.asarray(fits & np.triu(np.ones((count + 1, count + 1), bool), 1))


def _edges(seconds: Array, limit: float) -> list[int] | None:
    """Stage starts of the smallest sum whose stages all stay within `limit`, or None."""
    bounded = np.where(seconds <= limit, seconds, np.inf)
    stages, size = bounded.shape[:2]
    best = np.full(size, np.inf)
    best[0] = 0.0
    back = []
    for stage in range(stages):
        total = best[:, None] + bounded[stage]
        back.append(total.argmin(0))
        best = total.min(0)
    if not np.isfinite(best[-1]):
        return None
    starts, end = [], size - 1
    for stage in reversed(range(stages)):
        end = int(back[stage][end])
        starts.append(end)
    return starts[::-1]
