"""Which segments can be a stage of a plan that costs at most a limit, and what they may cost."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import Array, Index, OuterCosts
from darts_parallel.exact.bounds import SegmentGrid
from darts_parallel.exact.segments import StageSegments

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
    def build(stages: StageSegments, summed: Array, seconds: Array, sync: Array) -> "Completions":
        """Build from bounds of the possible segments, each `(N,)`."""
        return Completions(
            stages.before(summed, np.add),
            stages.after(summed, np.add),
            _finite(stages.before(seconds, np.maximum)),
            _finite(stages.after(seconds, np.maximum)),
            _finite(stages.before(sync, np.maximum)),
            _finite(stages.after(sync, np.maximum)),
        )

    def outside(self, stages: StageSegments) -> tuple[Array, Array, Array]:
        """Sum, bottleneck and largest synchronisation of all other stages, each `(N,)`."""
        before, after = (stages.stage, stages.first), (stages.stage + 1, stages.end)
        total = self.sum_before[before] + self.sum_after[after]
        slowest = np.maximum(self.slowest_before[before], self.slowest_after[after])
        return total, slowest, np.maximum(self.sync_before[before], self.sync_after[after])


def _finite(bottlenecks: Array) -> Array:
    """Replace infinity by 0: no stage, or no path, whose sum is infinite already."""
    return np.where(np.isfinite(bottlenecks), bottlenecks, 0.0)


@dataclass(frozen=True)
class SegmentBounds:
    """Bounds of every possible stage, `(N,)`, that tighten under a cost limit."""

    stages: StageSegments
    seconds: Array
    """Least seconds of one micro-batch."""
    summed: Array
    """Least seconds of one micro-batch, with what is paid once an iteration."""
    sync: Array
    """Least seconds of synchronisation."""
    mixed: Array
    """Least `r * seconds + sync` for every rate r, `(rates, N)`: a strategy is not best in both."""
    rates: Array

    @staticmethod
    def build(costs: OuterCosts, space_kind: str) -> "SegmentBounds":
        """Build the bounds of one outer choice without a limit, of the segments that fit the memory."""
        grid, count = SegmentGrid.build(costs, space_kind), float(costs.num_micro_batches)
        seconds = grid.lower_bounds(time=1.0)
        summed = (
            grid.lower_bounds(time=1.0, per_iteration=1.0) if costs.per_iteration.any() else seconds
        )
        # a second of a stage costs 1 to m seconds in the total, one of synchronisation 1 / K to 1
        rates = np.unique([1.0, count, float(costs.pp), count * costs.pp])
        mixed = np.stack([grid.lower_bounds(time=rate, sync=1.0) for rate in rates.tolist()])
        whole = SegmentBounds(
            grid.stages, seconds, summed, grid.lower_bounds(sync=1.0), mixed, rates
        )
        return whole.keep(np.isfinite(summed))

    def keep(self, kept: Bools) -> "SegmentBounds":
        """Select the segments `kept`, `(N,)`."""
        rows = (self.seconds[kept], self.summed[kept], self.sync[kept], self.mixed[:, kept])
        return SegmentBounds(self.stages.keep(kept), *rows, self.rates)

    def completions(self) -> Completions:
        """Return the least values of the other stages."""
        return Completions.build(self.stages, self.summed, self.seconds, self.sync)

    def within(
        self, limit: float, rest: float, rounds: int = 6
    ) -> "tuple[SegmentBounds, Completions]":
        """Propagate the limit: return tighter bounds of the segments that it leaves, and completions.

        Args:
            limit: Seconds that a plan may cost.
            rest: Micro-batches less one.
        """
        now, done = self, self.completions()
        for sweep in range(rounds):
            others, slowest, others_sync = done.outside(now.stages)
            sync, largest = (
                np.maximum(others_sync, now.sync),
                rest * np.maximum(slowest, now.seconds),
            )
            with np.errstate(invalid="ignore"):
                kept = others + now.summed + largest + sync <= limit
                room = largest_seconds(limit - others - sync, slowest, rest)
                room_sync = limit - others - now.summed - largest
                new_sync = np.maximum(now.sync, (now.mixed - now.rates[:, None] * room).max(axis=0))
                mixed = ((now.mixed - room_sync) / now.rates[:, None]).max(axis=0)
                new_seconds = np.maximum(now.seconds, mixed)
            summed = np.maximum(now.summed, new_seconds)
            tighter = replace(now, seconds=new_seconds, summed=summed, sync=new_sync)
            now = tighter.keep(kept)
            done = now.completions()
            if not kept.any() or (kept.all() and sweep > 1):
                break
        return now, done


def largest_seconds(left: Array, slowest: Array, rest: float) -> Array:
    """Return the largest t with `t + rest * max(t, slowest) <= left`."""
    hidden = left - rest * slowest
    return np.where(hidden <= slowest, hidden, left / (1.0 + rest))


@dataclass(frozen=True)
class UsableSegments:
    """Segments that can be a stage of a plan that costs at most `limit`; arrays `(N,)`."""

    costs: OuterCosts
    limit: float
    stages: StageSegments
    remaining: Array
    """Seconds left for the stage and the two maxima, `limit` less the other stages."""
    slowest: Array
    """Bottleneck of the other stages at least."""
    sync: Array
    """Largest synchronisation of any plan with the segment at least."""
    incoming: Array
    """Least seconds of the boundary before stage k when it begins at layer i, `(K, L + 1)`."""
    rest: Completions
    """Least values of the other stages."""

    @staticmethod
    def build(costs: OuterCosts, bounds: SegmentBounds, limit: float) -> "UsableSegments":
        """Build from the bounds of one outer choice."""
        now, done = bounds.within(limit, costs.num_micro_batches - 1.0)
        others, slowest, sync = done.outside(now.stages)
        incoming = np.zeros((costs.pp, costs.num_layers + 1))
        incoming[1:, 1:-1] = costs.p2p.min(axis=(-1, -2))[costs.boundary_kind]
        sync = np.maximum(sync, now.sync)
        return UsableSegments(
            costs, limit, now.stages, limit - others, slowest, sync, incoming, done
        )

    def budgets(self, signature: int) -> tuple[Index, Index, Array]:
        """Return first layers and ends of the stages of one signature, and what a stage may need there.

        Returns:
            Shapes `(n,)`, `(n,)` and `(3, n)`: budgets of a stage's seconds t; of m t and what it pays once;
            of t and what it pays once.
        """
        rest, stages = self.costs.num_micro_batches - 1.0, self.stages
        mine = np.flatnonzero(self.costs.stage_signatures[1][stages.stage] == signature)
        left, slowest = self.remaining[mine], self.slowest[mine]
        incoming = self.incoming[stages.stage[mine], stages.first[mine]]
        budgets = np.stack(
            [
                largest_seconds(left - self.sync[mine], slowest, rest) - incoming,
                left - (rest + 1.0) * incoming,
                left - rest * slowest - incoming,
            ]
        )
        return stages.first[mine], stages.end[mine], budgets
