"""Lower bounds on the iteration time of every outer choice, without a search.

Stage times are bounded for every contiguous segment of layers: memory is priced (a Lagrange multiplier
in seconds per byte), which separates the layers, and the best of a grid of prices is kept. The sum over
stages and the bottleneck are then bounded apart, each by a dynamic program over the stage boundaries,
so layers stay whole: pricing the bottleneck itself would split them, and is loose (17 % at 16 stages).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost import (
    BOUND_TOLERANCE,
    SOLVER_MEMORY_TOLERANCE,
    Array,
    CostTable,
    Index,
    OuterCosts,
    equal_rows,
    inside_sums,
    kept_bytes,
    prefix_sums,
    without_offloadable_memory,
)
from darts_parallel.exact._pareto import price_grids
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.segments import StageSegments
from darts_parallel.schedules import find

MOST_BYTES = 1e30
"""Cost of a strategy that may not be taken; finite, because a segment may hold none of a class of layers."""


def quick_lower_bounds(table: CostTable) -> Tensor:
    """Lower bounds of a closed form by every layer's least seconds, without memory, `(O,)`; in a moment."""
    illegal = ~table.allowed[:, None, :]

    def least(values: Tensor) -> Tensor:
        return values.detach().masked_fill(illegal, torch.inf).amin(-1)

    seconds, sync = least(table.time.amin(1)), least(table.sync.amin(1))
    return spread_bounds(
        seconds, sync, least(table.per_iteration), table.num_micro_batches, table.pp
    )


def spread_bounds(
    seconds: Tensor, sync: Tensor, per_iteration: Tensor, count: Tensor, pp: int
) -> Tensor:
    """Sum and bottleneck of the closed form where any layer may lie on any stage, in seconds, `(B,)`.

    The largest of `pp` stages is their mean at least, and holds a whole layer.

    Args:
        seconds: Least of every layer for one micro-batch, `(B, L)`.
        sync: Least of every layer for synchronisation, `(B, L)`.
        per_iteration: Least of every layer that are paid once, `(B, L)`.
        count: Micro-batches, `(B,)`.
    """
    slowest, last = (torch.maximum(x.sum(-1) / pp, x.amax(-1)) for x in (seconds, sync))
    total = seconds.sum(-1) + (count - 1) * slowest + last + per_iteration.sum(-1)
    return total * (1 - BOUND_TOLERANCE)


def outer_lower_bounds(
    table: CostTable,
    space_kind: str = "layerwise",
    known: float = float("inf"),
    late: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Return a lower bound on the iteration time of any feasible plan, for every outer choice.

    With several stages a device the bound is loose: it ignores memory (`simulated.packed_bound` does not).
    Where the pipeline is simulated the closed form bounds nothing; the work of the devices does.

    Args:
        space_kind: One of `config.schema.SPACES`. The bound of `layerwise` holds for all; `uniform` takes
            that of `stagewise`, which is tighter.
        known: Seconds of a known plan; what a looser bound already excludes keeps that.
        late: Asked often whether the time is over; looser bounds then stand.

    Returns:
        Seconds, shape `(O,)`; infinite where no plan fits the memory.
    """
    table = without_offloadable_memory(table)
    if table.virtual_stages > 1 or table.pipeline.simulated:
        return _work_bounds(table, space_kind, late)
    bounds = quick_lower_bounds(table)
    for outer in torch.nonzero(bounds <= known).flatten().tolist():
        if late():
            break
        bounds[outer] = outer_bound(table, outer, space_kind, known) or bounds[outer]
    return bounds


def outer_bound(
    table: CostTable, outer: int, space_kind: str, known: float = float("inf")
) -> float:
    """Return `lower_bound` of an outer choice, which its table remembers: a search and its check both ask.

    0 where the layers are too many for it.
    """
    bound, asked = table.proven.get((outer, space_kind), (0.0, 0.0))
    if bound <= known and asked < known:
        try:
            bound = lower_bound(OuterCosts.read(table, outer), space_kind, known)
        except DeadlineError:
            return 0.0
        table.proven[outer, space_kind] = bound, known if bound > known else float("inf")
    return bound


def _work_bounds(table: CostTable, space_kind: str, late: Callable[[], bool]) -> Tensor:
    """Return bounds that hold for any schedule, `(O,)`: a device computes its share of all micro-batches.

    One stage a device: stages stay whole layers and fit the memory, and the first micro-batch crosses the
    stages before a device first. Several: the cheapest work of all layers, spread evenly, without memory;
    where passes are simulated a device also waits for a forward pass of a first layer for each before it.
    """
    count = table.num_micro_batches.view(-1, 1, 1)
    illegal = ~table.allowed.unsqueeze(1)
    spent = count * table.time.detach().amin(1) + table.sync.detach().amin(1)
    even = spent.masked_fill(illegal, torch.inf).amin(-1).sum(-1) / table.pp
    if table.pipeline.simulated:
        ways = (
            table.forward.detach()
            .amin(1)
            .masked_fill(illegal, torch.inf)
            .amin(-1)[:, : table.pp - 1]
        )
        even = even + ways.cumsum(-1).sum(-1) / table.pp
    per_iteration = table.per_iteration.detach().masked_fill(illegal, torch.inf).amin(-1).sum(-1)
    if table.virtual_stages == 1:
        outers = range(table.num_outer)
        staged = [0.0 if late() else _staged_bound(table, outer, space_kind) for outer in outers]
        even = torch.maximum(even, torch.tensor(staged, dtype=torch.float64))
    return (even + per_iteration) * (1 - BOUND_TOLERANCE)


def _staged_bound(table: CostTable, outer: int, space_kind: str) -> float:
    """Bound one stage a device: the way to it, its work, and the way back or its synchronisation."""
    costs = OuterCosts.read(table, outer)
    if not table.pipeline.blocking:
        # messages then pass during the work
        costs = replace(costs, p2p=np.zeros_like(costs.p2p))
    try:
        grid, count = SegmentGrid.build(costs, space_kind), float(costs.num_micro_batches)
    except DeadlineError:
        return 0.0
    chosen = torch.as_tensor(costs.choices)

    def before(seconds: Tensor) -> Array:
        way = prefix_sums(seconds[outer].detach()[..., chosen].amin((0, -1)).numpy())
        return np.asarray(way[grid.stages.first])

    synced = grid.lower_bounds(time=count, sync=1.0) + before(table.forward)
    # the weights' gradients of the device may come after its last backward, during the path back
    if find(table.pipeline.schedule).split:
        return grid.stages.least_maximum(synced)
    crossed = grid.lower_bounds(time=count) + before(table.forward + table.backward)
    return grid.stages.least_maximum(np.maximum(synced, crossed))


def lower_bound(costs: OuterCosts, space_kind: str, known: float = float("inf")) -> float:
    """Bound the seconds of any feasible plan of one outer choice from below; see `outer_lower_bounds`."""
    rest, grid = costs.num_micro_batches - 1.0, SegmentGrid.build(costs, space_kind)
    stages, seconds = grid.stages, grid.lower_bounds(time=1.0)
    least_sum = stages.least_sum(seconds)
    if not np.isfinite(least_sum):
        return float("inf")
    if costs.per_iteration.any():
        least_sum = stages.least_sum(grid.lower_bounds(time=1.0, per_iteration=1.0))
    bottleneck = rest * stages.least_maximum(seconds)
    if (least_sum + bottleneck) * (1 - BOUND_TOLERANCE) > known:
        return (least_sum + bottleneck) * (1 - BOUND_TOLERANCE)
    sync = stages.least_maximum(grid.lower_bounds(sync=1.0))
    if (least_sum + bottleneck + sync) * (1 - BOUND_TOLERANCE) > known:
        return (least_sum + bottleneck + sync) * (1 - BOUND_TOLERANCE)
    # no strategy is best in time and synchronisation: bound the two together, as the two maxima
    # of one stage, and with the largest synchronisation replaced by the mean
    joint = least_sum + stages.least_maximum(grid.lower_bounds(time=rest, sync=1.0))
    mean = (
        stages.least_sum(grid.lower_bounds(time=1.0, per_iteration=1.0, sync=1.0 / costs.pp))
        + bottleneck
    )
    return max(least_sum + bottleneck + sync, joint, mean) * (1 - BOUND_TOLERANCE)


@dataclass(frozen=True)
class SegmentGrid:
    """The segments of one outer choice; those that hold equal layers are treated once."""

    costs: OuterCosts
    space_kind: str
    counts: Array
    """Layers of every class in every distinct segment, `(U, R)`."""
    segment: Index
    """Distinct segment of layers [i, j), `(L + 1, L + 1)`; 0, the empty one, where i >= j."""
    members: Index
    """One layer of every class, `(R,)`."""
    stages: StageSegments
    """The segments of every stage, N."""

    @staticmethod
    def build(costs: OuterCosts, space_kind: str) -> "SegmentGrid":
        """Find the distinct segments."""
        members = np.unique(costs.layer_class, return_index=True)[1]
        stages = StageSegments.legal(costs.pp, costs.fused_to_previous)
        segments = _distinct_segments(tuple(costs.layer_class.tolist()))
        return SegmentGrid(costs, space_kind, *segments, members, stages)

    def lower_bounds(
        self, time: float = 0.0, sync: float = 0.0, per_iteration: float = 0.0
    ) -> Array:
        """Bound of `time * t + sync * y + per_iteration * o` of every stage and segment that fits the memory.

        Args:
            time: Weight of the seconds of one micro-batch, t.
            sync: Weight of the synchronisation seconds, y.
            per_iteration: Weight of the seconds that are paid once, o.

        Returns:
            Of `stages`, `(N,)`; infinite where no strategy fits.
        """
        costs, stages = self.costs, self.stages
        signatures, of_stage = costs.stage_signatures
        objective = time * costs.time + sync * costs.sync + per_iteration * costs.per_iteration
        objective = objective[:, self.members]
        # what a kind cannot run is priced out, so that bounds are those of the legal strategies
        if not costs.kind_allowed.all():
            objective = (
                objective
                + objective.max() * len(costs.layer_class) * ~costs.kind_allowed[:, None, :]
            )
        solve = self._priced if self.space_kind == "layerwise" else self._single_choices
        kinds, in_flight, capacity = (np.array(column) for column in zip(*signatures, strict=True))
        values = solve(objective[kinds], in_flight, capacity)
        layers = values[of_stage[stages.stage], self.segment[stages.first, stages.end]]
        inside, kind = (
            inside_sums(time * costs.reshard.min(axis=(-1, -2))),
            costs.stage_kind[stages.stage],
        )
        layers = layers + (inside[kind, stages.end] - inside[kind, stages.first + 1])
        return layers + stages.entering(time * costs.p2p.min(axis=(-1, -2)), costs.boundary_kind)

    def _memory(self, in_flight: Array) -> Array:
        """Return the bytes of every class and strategy that add up over a stage, `(S, R, C)`."""
        static, activation = self.costs.static[self.members], self.costs.activation[self.members]
        return kept_bytes(static, activation, in_flight[:, None, None])

    @cached_property
    def _working(self) -> Array:
        """Return working bytes that every distinct segment needs at least, `(U,)`."""
        least = self.costs.working[self.members].min(axis=1)
        return np.asarray(np.where(self.counts > 0, least, 0.0).max(axis=1))

    @cached_property
    def _fits(self) -> NDArray[np.bool_]:
        """Return whether any strategies of a distinct segment fit a stage signature's memory, `(S, U)`.

        Every limit of the working bytes is tried that lets a layer keep less.
        """
        signatures, _ = self.costs.stage_signatures
        legal = self.costs.kind_allowed[[kind for kind, _, _ in signatures]][:, None, :]
        _, in_flight, capacity = (np.array(column) for column in zip(*signatures, strict=True))
        # what a layer keeps at least within a limit: strategies by their working bytes, and the least so far
        order = np.argsort(self.costs.working[self.members], axis=1, kind="stable")
        working = np.take_along_axis(self.costs.working[self.members], order, 1)
        kept = np.where(legal, self._memory(in_flight), MOST_BYTES)
        kept = np.minimum.accumulate(np.take_along_axis(kept, order[None], 2), axis=2)
        better = np.diff(kept, axis=2, prepend=np.inf) < 0
        fewest, rows = np.full((len(kept), len(self.counts)), np.inf), np.arange(len(working))
        for limit in np.unique(working[better.any(axis=0)]).tolist():
            within = (working <= limit).sum(axis=1)
            now = np.where(within > 0, kept[:, rows, np.maximum(within, 1) - 1], MOST_BYTES)
            np.minimum(fewest, now @ self.counts.T + limit, out=fewest)
        return np.asarray(fewest <= (capacity * (1 + SOLVER_MEMORY_TOLERANCE))[:, None])

    @cached_property
    def _possible(self) -> list[Index]:
        """Return the distinct segments that a stage of each signature may hold and that fit its memory."""
        held = np.zeros(self._fits.shape, dtype=bool)
        signature = self.costs.stage_signatures[1][self.stages.stage]
        held[signature, self.segment[self.stages.first, self.stages.end]] = True
        return [np.flatnonzero(row) for row in held & self._fits]

    def _priced(self, objective: Array, in_flight: Array, capacity: Array) -> Array:
        """Return the best price bound of every distinct segment, `(S, U)`, for every stage signature.

        Args:
            objective: Of every class and strategy, `(S, R, C)`.
            in_flight: Micro-batches, `(S,)`.
            capacity: Bytes, `(S,)`.
        """
        memory = self._memory(in_flight)
        free = (capacity * (1 + SOLVER_MEMORY_TOLERANCE))[:, None] - self._working
        first, end = np.divmod(np.unique(self.segment, return_index=True)[1], len(self.segment))
        result = np.full(free.shape, np.inf)
        for row, (prices, own) in enumerate(
            zip(price_grids(objective, memory), self._possible, strict=True)
        ):
            layers = (objective[row].T + prices[:, None, None] * memory[row].T).min(axis=1)
            sums = prefix_sums(layers[:, self.costs.layer_class])
            inside = sums.take(end[own], axis=1) - sums.take(first[own], axis=1)
            result[row, own] = (inside - prices[:, None] * free[row, own]).max(
                axis=0, initial=-np.inf
            )
        return result

    def _single_choices(self, objective: Array, in_flight: Array, capacity: Array) -> Array:
        """Return the smallest value of any one strategy that fits, `(S, U)`; arguments as of `_priced`."""
        working = self.costs.working[self.members]
        largest = np.zeros((len(self.counts), working.shape[1]))
        for held, row in zip(self.counts.T, working, strict=True):
            np.maximum(largest, np.where(held[:, None] > 0, row, 0.0), out=largest)
        result = np.empty((len(objective), len(self.counts)))
        for row, memory in enumerate(self._memory(in_flight)):
            fits = self.counts @ memory + largest <= capacity[row] * (1 + SOLVER_MEMORY_TOLERANCE)
            result[row] = np.where(fits, self.counts @ objective[row], np.inf).min(axis=1)
        return result


@lru_cache(maxsize=16)
def _distinct_segments(layer_class: tuple[int, ...]) -> tuple[Array, Index]:
    """Return `counts` and `segment` of a `SegmentGrid`; all outer choices of a problem share a few."""
    one_hot = np.equal.outer(np.unique(layer_class), np.array(layer_class)).astype(float)
    prefix = prefix_sums(one_hot).T
    counts = (prefix[None, :] - prefix[:, None]).clip(min=0)
    counts[np.tril_indices(len(prefix))] = 0
    rows = counts.reshape(-1, len(one_hot))
    segment = equal_rows(rows)
    order = np.unique(segment, return_index=True)[1]
    return rows[order], segment.reshape(counts.shape[:2])
