"""Which segments can be a stage of a plan that costs at most a limit, and what they may cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.exact.bounds import OuterCosts, SegmentGrid, price_grid
from darts_parallel.exact.segments import (
    Array,
    Index,
    NodeGroups,
    forward_bottlenecks,
    forward_sums,
    segment_max,
)

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Completions:
    """Least values of the stages before and after a segment; arrays `(K + 1, L + 1)`.

    `*_before[k, j]`: stages 0 to k - 1 hold layers [0, j). `*_after[k, j]`: stages k to K - 1 hold [j, L).
    """

    sum_before: Array
    sum_after: Array
    slowest_before: Array
    slowest_after: Array
    sync_before: Array
    sync_after: Array

    @staticmethod
    def build(summed: Array, seconds: Array, sync: Array) -> "Completions":
        """From segment bounds of shape `(K, L + 1, L + 1)`."""
        back = [np.ascontiguousarray(x[::-1, ::-1, ::-1].swapaxes(1, 2)) for x in (summed, seconds, sync)]
        return Completions(
            forward_sums(summed),
            forward_sums(back[0])[::-1, ::-1],
            _finite(forward_bottlenecks(seconds)),
            _finite(forward_bottlenecks(back[1])[::-1, ::-1]),
            _finite(forward_bottlenecks(sync)),
            _finite(forward_bottlenecks(back[2])[::-1, ::-1]),
        )

    def outside(self) -> tuple[Array, Array, Array]:
        """Sum, bottleneck and largest synchronisation of all other stages, each `(K, L + 1, L + 1)`."""
        total = self.sum_before[:-1, :, None] + self.sum_after[1:, None, :]
        slowest = np.maximum(self.slowest_before[:-1, :, None], self.slowest_after[1:, None, :])
        return total, slowest, np.maximum(self.sync_before[:-1, :, None], self.sync_after[1:, None, :])


def _finite(bottlenecks: Array) -> Array:
    """0 where there is no stage, and where there is no way: there the sum is infinite already."""
    return np.where(np.isfinite(bottlenecks), bottlenecks, 0.0)


@dataclass
class SegmentBounds:
    """Bounds of every stage and segment, `(K, L + 1, L + 1)`, that tighten under a cost limit."""

    seconds: Array
    """Least seconds of one micro-batch."""
    summed: Array
    """Least seconds of one micro-batch, with what is paid once an iteration."""
    sync: Array
    """Least seconds of synchronisation."""
    mixed: tuple[tuple[float, Array], ...]
    """Rates r and the least `r * seconds + sync`: a strategy is not best in both."""

    @staticmethod
    def build(costs: OuterCosts, mode: str) -> "SegmentBounds":
        """Bounds of one outer choice without a limit."""
        grid, count = SegmentGrid.build(costs, mode), float(costs.num_micro_batches)
        seconds = grid.lower_bounds(time=1.0)
        summed = grid.lower_bounds(time=1.0, per_iteration=1.0) if costs.per_iteration.any() else seconds
        # a second of a stage costs 1 to m seconds in the total, one of synchronisation 1 / K to 1
        rates = sorted({1.0, count, float(costs.pp), count * costs.pp})
        mixed = tuple((rate, grid.lower_bounds(time=rate, sync=1.0)) for rate in rates)
        return SegmentBounds(seconds, summed, grid.lower_bounds(sync=1.0), mixed)

    def within(
        self, limit: float, rest: float, rounds: int = 6
    ) -> "tuple[SegmentBounds, Completions, Bools]":
        """What the limit implies, by propagation: tighter bounds, completions, and possible stages.

        Args:
            limit: Seconds that a plan may cost.
            rest: Micro-batches less one.
            rounds: Largest number of sweeps.
        """
        now, possible = self, np.isfinite(self.summed)
        done = Completions.build(now.summed, now.seconds, now.sync)
        for sweep in range(rounds):
            others, slowest, others_sync = done.outside()
            sync = np.maximum(others_sync, now.sync)
            with np.errstate(invalid="ignore"):
                least = others + now.summed + rest * np.maximum(slowest, now.seconds) + sync
                kept = possible & (least <= limit)
                room = largest_seconds(limit - others - sync, slowest, rest)
                room_sync = limit - others - now.summed - rest * np.maximum(slowest, now.seconds)
                new_sync, new_seconds = now.sync, now.seconds
                for rate, value in self.mixed:
                    new_sync = np.maximum(new_sync, value - rate * room)
                    new_seconds = np.maximum(new_seconds, (value - room_sync) / rate)
            now = SegmentBounds(
                np.where(kept, new_seconds, np.inf),
                np.where(kept, np.maximum(now.summed, new_seconds), np.inf),
                np.where(kept, new_sync, np.inf),
                self.mixed,
            )
            done = Completions.build(now.summed, now.seconds, now.sync)
            if not kept.any() or (kept.sum() == possible.sum() and sweep > 1):
                return now, done, kept
            possible = kept
        return now, done, possible


def largest_seconds(left: Array, slowest: Array, rest: float) -> Array:
    """Largest t with `t + rest * max(t, slowest) <= left`."""
    hidden = left - rest * slowest
    return np.where(hidden <= slowest, hidden, left / (1.0 + rest))


@dataclass(frozen=True)
class LabelLimits:
    """Limits on the labels of every node of a segment trie, for one stage signature."""

    weights: Array
    """Linear forms over the columns of a label, `(F, 5)`."""
    limits: Array
    """Largest useful value of each form, `(nodes, F)`."""
    wanted: Bools
    """Nodes that lead to a stage, `(nodes,)`."""
    final: Bools
    """Nodes that can be a stage, `(nodes,)`."""
    room: Array
    """Bytes below which a label fits whatever follows, `(nodes,)`."""
    total: Array | None
    """Seconds per iteration by second of the first three columns, where there is one stage only."""

    def admit(self, values: Array, node: int) -> Bools:
        """Which labels, `(n, 5)`, may still become part of a plan within the limit."""
        return np.asarray((values @ self.weights.T <= self.limits[node]).all(axis=1))

    def relevant(self, values: Array, node: int) -> Array:
        """The labels, `(n, 5)`, for dominance: their times, then bytes, equal where they cannot bind."""
        memory, free = values[:, 3:].copy(), values[:, 3] <= self.room[node]
        memory[free] = (self.room[node], 0.0)
        return np.concatenate([self.times(values), memory], axis=1)

    def times(self, values: Array) -> Array:
        """What must not be larger for one stage to replace another, `(n, 1 to 3)`; all grow with the seconds.

        The seconds for the bottleneck. Their sum with those paid once, and with the synchronisation:
        more of it in one stage adds at most as much to the total. Without a pipeline, the total.
        """
        seconds, per_iteration, sync = values[:, :3].T
        if self.total is not None:
            return values[:, :3] @ self.total[:, None]
        columns = (
            [seconds, seconds + sync]
            if not per_iteration.any()
            else [seconds, seconds + per_iteration, seconds + per_iteration + sync]
        )
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class UsableSegments:
    """Segments that can be a stage of a plan that costs at most `limit`."""

    costs: OuterCosts
    limit: float
    ends: Bools
    """`(K, L + 1, L + 1)`."""
    remaining: Array
    """Seconds left for the stage and the two maxima, `limit` less the other stages; same shape."""
    slowest: Array
    """Bottleneck of the other stages at least; same shape."""
    sync: Array
    """Largest synchronisation of any plan with the segment at least; same shape."""
    incoming: Array
    """Least seconds of the boundary before stage k when it begins at layer i, `(K, L + 1)`."""

    @staticmethod
    def build(costs: OuterCosts, bounds: SegmentBounds, limit: float) -> "UsableSegments":
        """From the bounds of one outer choice."""
        now, done, ends = bounds.within(limit, costs.num_micro_batches - 1.0)
        others, slowest, sync = done.outside()
        incoming = np.zeros(ends.shape[:2])
        incoming[1:, 1:-1] = costs.p2p.min(axis=(-1, -2))[costs.boundary_kind]
        return UsableSegments(
            costs, limit, ends, limit - others, slowest, np.maximum(sync, now.sync), incoming
        )

    def budgets(self, signature: int, kind: int, in_flight: float, capacity: float, groups: NodeGroups,
                choices: Sequence[Index]) -> LabelLimits:  # fmt: skip
        """Limits for the stages of one signature: kind, micro-batches in flight and bytes of a device.

        Every limit takes the loosest of the uses that a partial stage can still reach; what the
        missing layers need at least is subtracted, with memory priced as in the lower bound.
        `choices` are the useful strategies of every layer.
        """
        rest = self.costs.num_micro_batches - 1.0
        mine = np.flatnonzero(self.costs.stage_signatures()[1] == signature)
        ends, left, slowest = self.ends[mine], self.remaining[mine], self.slowest[mine]
        incoming = self.incoming[mine][:, :, None]
        with np.errstate(invalid="ignore"):
            rows = [
                ((1.0, 0.0, 0.0), largest_seconds(left - self.sync[mine], slowest, rest) - incoming),
                ((rest + 1.0, 1.0, 1.0), left - (rest + 1.0) * incoming),
                ((1.0, 1.0, 1.0), left - rest * slowest - incoming),
            ]
        forms = _LinearLimits(self.costs, kind, in_flight, capacity, choices)
        for weights, budget in rows:
            forms.add(weights, np.where(ends, budget, -np.inf).max(axis=0))
        some = np.asarray(ends.any(axis=0))
        forms.add_memory(np.where(some, 0.0, -np.inf))
        return forms.collect(some, groups)


class _LinearLimits:
    """Collects linear forms over labels and their limits for every partial segment."""

    def __init__(
        self, costs: OuterCosts, kind: int, in_flight: float, capacity: float, choices: Sequence[Index]
    ) -> None:
        self.costs, self.kind, self.capacity = costs, kind, capacity
        self.memory = costs.static + in_flight * costs.activation
        self.working = costs.working.min(axis=1)
        self.weights: list[tuple[float, ...]] = []
        self.limits: list[Array] = []
        self.largest_working = segment_max(self.working)
        self.most = np.array([self.memory[layer, own].max() for layer, own in enumerate(choices)])
        most_working = [costs.working[layer, own].max() for layer, own in enumerate(choices)]
        self.most_working = segment_max(np.array(most_working))

    def add(self, weights: tuple[float, float, float], budget: Array) -> None:
        """Forms `weights . (seconds, once, sync) + price * bytes`, one for each useful price."""
        costs = self.costs
        seconds, per_iteration, sync = weights
        value = (
            seconds * costs.time[self.kind]
            + per_iteration * costs.per_iteration
            + sync * costs.sync[self.kind]
        )
        first = np.unique(costs.layer_class, return_index=True)[1]
        for price in price_grid(value[first], self.memory[first], limit=10):
            least = (value + price * self.memory).min(axis=1)
            # the working bytes so far are part of the final ones
            self._append((*weights, price, price), least, budget + price * self.capacity)

    def add_memory(self, usable: Array) -> None:
        """The memory of a stage itself; `usable` is 0 for uses and minus infinity elsewhere."""
        least = self.memory.min(axis=1)
        self._append((0.0, 0.0, 0.0, 1.0, 0.0), least, usable + self.capacity - self.largest_working)
        self._append((0.0, 0.0, 0.0, 1.0, 1.0), least, usable + self.capacity)

    def _append(self, weights: tuple[float, ...], least: Array, limit: Array) -> None:
        """Limit at [i, j): the loosest over uses [i, e >= j) less what layers [j, e) need at least."""
        prefix = np.concatenate([[0.0], np.cumsum(least)])
        loosest = np.maximum.accumulate((limit - prefix)[:, ::-1], axis=1)[:, ::-1]
        self.weights.append(weights)
        # prefix sums round; a label that meets its budget exactly must stay
        self.limits.append(loosest + prefix + 1e-12 * np.abs(np.where(np.isfinite(limit), limit, 0.0)).max())

    def collect(self, ends: Bools, groups: NodeGroups) -> LabelLimits:
        """The limits by node: the loosest over the segments that share it."""
        size = len(groups.first) + 1
        begins, stops = groups.begins, groups.stops
        numbers = groups.node[begins, stops]
        limits = groups.largest(np.stack([limit[begins, stops] for limit in self.limits], axis=1), -np.inf)
        final = np.zeros(size, dtype=bool)
        final[numbers[ends[begins, stops]]] = True
        wanted = np.asarray(np.isfinite(limits).all(axis=1))
        total = np.array([self.costs.num_micro_batches, 1.0, 1.0]) if self.costs.pp == 1 else None
        return LabelLimits(np.array(self.weights), limits, wanted, final, self._room(ends, groups), total)

    def _room(self, ends: Bools, groups: NodeGroups) -> Array:
        """Bytes of every node below which memory cannot bind: the missing layers at their largest."""
        prefix = np.concatenate([[0.0], np.cumsum(self.most)])
        spare = np.where(ends, self.capacity - self.most_working - prefix, np.inf)
        least = np.minimum.accumulate(spare[:, ::-1], axis=1)[:, ::-1] + prefix
        result = -groups.largest(-least[groups.begins, groups.stops], -np.inf)
        return result - 1e-12 * self.capacity
