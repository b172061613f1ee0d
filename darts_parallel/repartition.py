"""Exact stage edges for given strategies: the smallest `sum + (m - 1) max` of stage seconds that fits."""

from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import HardPlans
from darts_parallel.segments import Array, rising_limits, segment_max, spans, split_below
from darts_parallel.table import CostTable

LIMITS_ABOVE = 8
"""Limits above the smallest feasible one that are tried: a slower bottleneck may have a smaller sum."""


def repartitioned(table: CostTable, plan: HardPlans) -> HardPlans:
    """The plan with other edges: the best for its strategies under several limits.

    Synchronisation is left out of the program; the caller evaluates what comes back.
    """
    if table.pp == 1:
        return plan
    seconds = np.where(_segments_that_fit(table, plan), _segment_seconds(table, plan), np.inf)
    limits = islice(rising_limits(seconds), LIMITS_ABOVE)
    starts = [split_below(seconds, limit)[1] for limit in limits]
    if not starts:
        return plan
    count = len(starts)
    return HardPlans(plan.outer.expand(count), plan.choices.expand(count, -1), torch.tensor(starts))


def _segment_seconds(table: CostTable, plan: HardPlans) -> Array:
    """Seconds of layers i to j - 1 as stage k, shape `(K, L + 1, L + 1)`."""
    outer, layers = int(plan.outer[0]), torch.arange(table.num_layers)
    choices = plan.choices[0]
    layout = table.layout[choices]
    result = np.full((table.pp, table.num_layers + 1, table.num_layers + 1), np.inf)
    for kind in sorted(set(table.stage_kind.tolist())):
        own = table.time[outer, kind, layers, choices].numpy()
        change = table.reshard[outer, kind, layers[:-1], layout[:-1], layout[1:]].numpy()
        changes = np.concatenate([[0.0, 0.0], np.cumsum(change)])
        block = spans(own)
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
    flight, capacity = table.in_flight[outer].numpy(), table.capacity.numpy()
    kept = spans(static + flight[:, None] * activation)
    fits = kept + segment_max(working) <= capacity[:, None, None]
    fits[:, np.flatnonzero(table.joined.numpy())] = False
    return np.asarray(fits & np.triu(np.ones(fits.shape[1:], bool), 1))
