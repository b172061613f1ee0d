"""Lower bounds on the iteration time of every outer choice, without a search.

Stage times are bounded for every contiguous segment of layers (`SegmentGrid`). The sum over stages and the
bottleneck are then bounded apart, each by a dynamic programme over the stage boundaries, so layers stay
whole: pricing the bottleneck itself would split them, and is loose (17 % at 16 stages).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    BOUND_TOLERANCE,
    Array,
    CostTable,
    OuterCosts,
    Tables,
    filled,
    flatnonzero,
    prefix_sums,
    without_offloadable_memory,
)
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.segment_grid import SegmentGrid


def never() -> bool:
    """Return that the time is not over."""
    return False


def quick_lower_bounds(table: CostTable) -> Tensor:
    """Bound the closed form by every layer's least seconds, without memory, `(O,)`; takes milliseconds."""
    seconds = _least(table, table.time.amin(1))
    sync = _least(table, table.sync.amin(1))
    per_iteration = _least(table, table.per_iteration)
    return spread_bounds(seconds, sync, per_iteration, table.num_micro_batches, table.pp)


def _least(table: CostTable, values: Tensor) -> Tensor:
    """Return the least value of every layer's allowed strategies: `(O, L, C)` to `(O, L)`."""
    illegal = ~table.allowed[:, None, :]
    return values.detach().masked_fill(illegal, torch.inf).amin(-1)


def spread_bounds(
    seconds: Tensor,
    sync: Tensor,
    per_iteration: Tensor,
    count: Tensor,
    pp: int,
) -> Tensor:
    """Sum and bottleneck of the closed form where any layer may lie on any stage, in seconds, `(B,)`.

    Args:
        seconds: Least of every layer for one micro-batch, `(B, L)`.
        sync: Least of every layer for synchronisation, `(B, L)`.
        per_iteration: Least of every layer that are paid once, `(B, L)`.
        count: Micro-batches, `(B,)`.
        pp: Stages.
    """
    bottleneck = _largest_stage(seconds, pp)
    total = seconds.sum(-1) + (count - 1) * bottleneck
    total = total + _largest_stage(sync, pp) + per_iteration.sum(-1)
    return total * (1 - BOUND_TOLERANCE)


def _largest_stage(layers: Tensor, pp: int) -> Tensor:
    """Bound the largest of `pp` stages: it is their mean at least, and holds a whole layer."""
    mean = layers.sum(-1) / pp
    return torch.maximum(mean, layers.amax(-1))


class OuterBound(NamedTuple):
    """Lower bound of one outer choice; the least sorts first."""

    seconds: float
    table: int
    """Number of the table."""
    outer: int


def rising_bounds(
    tables: Mapping[int, CostTable],
    space_kind: str,
    late: Callable[[], bool] = never,
) -> list[OuterBound]:
    """Return `outer_lower_bounds` of numbered tables, the least first."""
    found = []
    for number, table in tables.items():
        bounds = outer_lower_bounds(table, space_kind, late=late).tolist()
        for outer, seconds in enumerate(bounds):
            found.append(OuterBound(seconds, number, outer))
    return sorted(found)


def least_bound(tables: Tables, space_kind: str, known: float = inf) -> float:
    """Return seconds that no plan of any table undercuts; infinite where no plan fits.

    Arguments as of `outer_lower_bounds`.
    """
    bounds = [float(outer_lower_bounds(table, space_kind, known).min()) for table in tables]
    return min(bounds, default=inf)


def outer_lower_bounds(
    table: CostTable,
    space_kind: str = "layerwise",
    known: float = inf,
    late: Callable[[], bool] = never,
) -> Tensor:
    """Return a lower bound on the iteration time of any feasible plan, for every outer choice.

    With several stages a device the bound is loose: it ignores memory (`simulated.packed_bound` does not).
    Where the pipeline is simulated the closed form bounds nothing; the work of the devices does.

    Args:
        space_kind: One of `config.schema.SPACES`. The bound of `layerwise` holds for all; `uniform` takes
            the bound of `stagewise`, which is tighter.
        known: Seconds of a known plan; what a looser bound already excludes keeps that.
        late: Asked often whether the time is over; looser bounds then stand.

    Returns:
        Seconds, shape `(O,)`; infinite where no plan fits the memory.
    """
    if table.own is not None and not table.own.non_negative:
        return filled(0.0, table.num_outer)
    table = without_offloadable_memory(table)
    if table.virtual_stages > 1 or table.simulated:
        return _work_bounds(table, space_kind, late)
    bounds = quick_lower_bounds(table)
    for outer in flatnonzero(bounds <= known).tolist():
        if late():
            break
        bounds[outer] = outer_bound(table, outer, space_kind, known) or bounds[outer]
    return bounds


def outer_bound(
    table: CostTable,
    outer: int,
    space_kind: str,
    known: float = inf,
) -> float:
    """Return `lower_bound` of an outer choice; 0 where the layers are too many for it.

    The table remembers it: a search and its check both need it.
    """
    bound, sufficient = table.proven.get((outer, space_kind), (0.0, 0.0))
    if bound <= known and sufficient < known:
        try:
            bound = lower_bound(OuterCosts.read(table, outer), space_kind, known)
        except DeadlineError:
            return 0.0
        table.proven[outer, space_kind] = bound, known if bound > known else inf
    return bound


def _work_bounds(
    table: CostTable,
    space_kind: str,
    late: Callable[[], bool],
) -> Tensor:
    """Return bounds that hold for any schedule, `(O,)`: a device computes its share of all micro-batches.

    One stage a device: stages are whole layers and fit the memory, and the first micro-batch crosses the
    stages before a device first. Several stages: the cheapest work of all layers is spread evenly, without
    memory. Where passes are simulated, a device also waits for a forward pass of each device before it.
    """
    count = table.num_micro_batches.view(-1, 1, 1)
    work = count * table.time.amin(1) + table.sync.amin(1)
    work = _least(table, work)
    even = work.sum(-1) / table.pp
    if table.simulated:
        forward = _least(table, table.forward.amin(1))
        waits = forward[:, : table.pp - 1].cumsum(-1)
        even = even + waits.sum(-1) / table.pp
    if table.virtual_stages == 1:
        for outer in range(table.num_outer):
            if late():
                break
            staged = _staged_bound(table, outer, space_kind)
            even[outer] = max(float(even[outer]), staged)
    per_iteration = _least(table, table.per_iteration).sum(-1)
    return (even + per_iteration) * (1 - BOUND_TOLERANCE)


def _staged_bound(table: CostTable, outer: int, space_kind: str) -> float:
    """Lower bound with one stage per device: pipeline fill, work, and drain or gradient sync."""
    costs = OuterCosts.read(table, outer)
    if not table.pipeline.blocking:
        # messages then pass during the work
        costs = replace(costs, p2p=np.zeros_like(costs.p2p))
    try:
        grid = SegmentGrid.build(costs, space_kind)
    except DeadlineError:
        return 0.0
    count = float(costs.num_micro_batches)
    first = grid.stages.first
    fill = seconds_before(table.forward[outer], costs)[first]
    synced = grid.lower_bounds(time=count, sync=1.0) + fill
    # the weights' gradients of the device may come after its last backward, during the drain
    if table.rule.split:
        return grid.stages.least_maximum(synced)
    fill_and_drain = seconds_before(table.time[outer], costs)[first]
    crossed = grid.lower_bounds(time=count) + fill_and_drain
    return grid.stages.least_maximum(np.maximum(synced, crossed))


def seconds_before(passes: Tensor, costs: OuterCosts) -> Array:
    """Return the least seconds of a pass through all layers before each one, `(L + 1,)`.

    Args:
        passes: Seconds of the pass, `(Q, L, C)`, all strategies of the table.
    """
    chosen = passes.detach().numpy()[..., costs.choices]
    legal = np.where(costs.kind_allowed[:, None, :], chosen, np.inf)
    return prefix_sums(legal.min(axis=(0, -1)))


def lower_bound(costs: OuterCosts, space_kind: str, known: float = inf) -> float:
    """Bound the seconds of any feasible plan of one outer choice from below; see `outer_lower_bounds`.

    A bound above `known` is not tightened.
    """
    later = costs.num_micro_batches - 1.0
    grid = SegmentGrid.build(costs, space_kind)
    stages = grid.stages
    seconds = grid.lower_bounds(time=1.0)
    least_sum = stages.least_sum(seconds)
    if not np.isfinite(least_sum):
        return inf
    if costs.per_iteration.any():
        least_sum = stages.least_sum(grid.lower_bounds(time=1.0, per_iteration=1.0))
    bottleneck = later * stages.least_maximum(seconds)
    bound = (least_sum + bottleneck) * (1 - BOUND_TOLERANCE)
    if bound > known:
        return bound
    sync = stages.least_maximum(grid.lower_bounds(sync=1.0))
    apart = least_sum + bottleneck + sync
    bound = apart * (1 - BOUND_TOLERANCE)
    if bound > known:
        return bound
    # no strategy is best in time and synchronisation: bound the two together, as the two maxima
    # of one stage, and with the largest synchronisation replaced by the mean
    joint = least_sum + stages.least_maximum(grid.lower_bounds(time=later, sync=1.0))
    with_mean = grid.lower_bounds(time=1.0, per_iteration=1.0, sync=1.0 / costs.pp)
    mean = stages.least_sum(with_mean) + bottleneck
    return max(apart, joint, mean) * (1 - BOUND_TOLERANCE)
