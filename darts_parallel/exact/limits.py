"""Which segments can be a stage of a plan that costs at most a limit, and what they may cost."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from darts_parallel.cost import Array, Bools, Index, OuterCosts
from darts_parallel.exact.segment_grid import SegmentGrid
from darts_parallel.exact.segments import StageSegments

MAX_ROUNDS = 6
"""Sweeps that propagate a limit; later ones exclude few segments."""


@dataclass(frozen=True)
class Completions:
    """Least values of the stages before and after a segment; arrays `(K + 1, L + 1)`.

    `before`[k, j]: stages 0 to k - 1 hold layers [0, j). `after`[k, j]: stages k to K - 1 hold [j, L).
    """

    before: "OtherStages"
    after: "OtherStages"

    @staticmethod
    def build(
        stages: StageSegments,
        summed: Array,
        seconds: Array,
        sync: Array,
    ) -> "Completions":
        """Build from bounds of the possible segments, each `(N,)`."""

        def walked(walk: Callable[[Array, np.ufunc], Array]) -> OtherStages:
            total = walk(summed, np.add)
            slowest = _finite(walk(seconds, np.maximum))
            largest = _finite(walk(sync, np.maximum))
            return OtherStages(total, slowest, largest)

        return Completions(walked(stages.before), walked(stages.after))

    def outside(self, stages: StageSegments) -> "OtherStages":
        """Return the least values of all stages but one, for every stage."""
        before = (stages.stage, stages.first)
        after = (stages.stage + 1, stages.end)
        total = self.before.total[before] + self.after.total[after]
        slowest = np.maximum(self.before.slowest[before], self.after.slowest[after])
        sync = np.maximum(self.before.sync[before], self.after.sync[after])
        return OtherStages(total, slowest, sync)


@dataclass(frozen=True)
class OtherStages:
    """Least values of the stages that a plan has next to some; arrays of one shape."""

    total: Array
    """Sum of their seconds."""
    slowest: Array
    """Seconds of the slowest one."""
    sync: Array
    """Largest synchronisation."""


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
        grid = SegmentGrid.build(costs, space_kind)
        seconds = grid.lower_bounds(time=1.0)
        summed = seconds
        if costs.per_iteration.any():
            summed = grid.lower_bounds(time=1.0, per_iteration=1.0)
        sync = grid.lower_bounds(sync=1.0)
        # a second of a stage costs 1 to m seconds in the total, one of synchronisation 1 / K to 1
        count = float(costs.num_micro_batches)
        rates = np.unique([1.0, count, float(costs.pp), count * costs.pp])
        mixed = [grid.lower_bounds(time=rate, sync=1.0) for rate in rates.tolist()]
        whole = SegmentBounds(grid.stages, seconds, summed, sync, np.stack(mixed), rates)
        return whole.keep(np.isfinite(summed))

    def keep(self, kept: Bools) -> "SegmentBounds":
        """Select the segments `kept`, `(N,)`."""
        names = ("seconds", "summed", "sync", "mixed")
        rows = {name: getattr(self, name)[..., kept] for name in names}
        return replace(self, stages=self.stages.keep(kept), **rows)

    def completions(self) -> Completions:
        """Return the least values of the other stages."""
        return Completions.build(self.stages, self.summed, self.seconds, self.sync)

    def within(self, limit: float, later: float, rounds: int = MAX_ROUNDS) -> "SegmentBounds":
        """Propagate the limit: return tighter bounds of the segments that it leaves.

        Args:
            limit: Seconds that a plan may cost.
            later: Micro-batches less one.
            rounds: Sweeps over all segments at most.
        """
        bounds = self
        for sweep in range(rounds):
            kept, tighter = bounds._sweep(limit, later)
            bounds = tighter.keep(kept)
            settled = kept.all() and sweep > 1
            if settled or not kept.any():
                break
        return bounds

    def _sweep(self, limit: float, later: float) -> "tuple[Bools, SegmentBounds]":
        """Return the segments that a plan within the limit may have, and tighter bounds of all."""
        others = self.completions().outside(self.stages)
        sync = np.maximum(others.sync, self.sync)
        bottleneck = later * np.maximum(others.slowest, self.seconds)
        rates = self.rates[:, None]
        with np.errstate(invalid="ignore"):
            left = limit - others.total
            kept = others.total + self.summed + bottleneck + sync <= limit
            room = largest_seconds(left - sync, others.slowest, later)
            room_sync = left - self.summed - bottleneck
            least_sync = (self.mixed - rates * room).max(axis=0)
            least_seconds = ((self.mixed - room_sync) / rates).max(axis=0)
            new_sync = np.maximum(self.sync, least_sync)
            new_seconds = np.maximum(self.seconds, least_seconds)
        summed = np.maximum(self.summed, new_seconds)
        return kept, replace(self, seconds=new_seconds, summed=summed, sync=new_sync)


def largest_seconds(left: Array, slowest: Array, later: float) -> Array:
    """Return the largest t with `t + later * max(t, slowest) <= left`."""
    hidden = left - later * slowest
    return np.where(hidden <= slowest, hidden, left / (1.0 + later))


@dataclass(frozen=True)
class UsableSegments:
    """Segments that can be a stage of a plan that costs at most `limit`; arrays `(N,)`."""

    costs: OuterCosts
    limit: float
    stages: StageSegments
    others: OtherStages
    """Least values of the other stages; the synchronisation counts the segment itself, too."""
    incoming: Array
    """Least seconds of the boundary before stage k when it begins at layer i, `(K, L + 1)`."""
    rest: Completions
    """Least values of the other stages."""

    @staticmethod
    def build(costs: OuterCosts, bounds: SegmentBounds, limit: float) -> "UsableSegments":
        """Build from the bounds of one outer choice."""
        bounds = bounds.within(limit, costs.num_micro_batches - 1.0)
        completions = bounds.completions()
        others = completions.outside(bounds.stages)
        others = replace(others, sync=np.maximum(others.sync, bounds.sync))
        incoming = np.zeros((costs.pp, costs.num_layers + 1))
        least = costs.p2p.min(axis=(-1, -2))
        incoming[1:, 1:-1] = least[costs.boundary_kind]
        return UsableSegments(costs, limit, bounds.stages, others, incoming, completions)

    def budgets(self, signature: int) -> "Budgets":
        """Return the stages of one signature with what each of them may need."""
        stages = self.stages
        later = self.costs.num_micro_batches - 1.0
        of_stage = self.costs.stage_signatures[1]
        mine = np.flatnonzero(of_stage[stages.stage] == signature)
        # for the stage and the two maxima
        left = self.limit - self.others.total[mine]
        slowest = self.others.slowest[mine]
        incoming = self.incoming[stages.stage[mine], stages.first[mine]]
        sync = self.others.sync[mine]
        seconds = largest_seconds(left - sync, slowest, later) - incoming
        all_batches = left - (later + 1.0) * incoming
        once = left - later * slowest - incoming
        rows = np.stack([seconds, all_batches, once])
        return Budgets(stages.first[mine], stages.end[mine], rows)


@dataclass(frozen=True)
class Budgets:
    """Largest seconds that n stages of one signature may need."""

    first: Index
    """First layers, `(n,)`."""
    end: Index
    """Layers after the last ones, `(n,)`."""
    seconds: Array
    """Limits of a stage's seconds t; of m t plus its single costs; of t plus its single costs: `(3, n)`."""
