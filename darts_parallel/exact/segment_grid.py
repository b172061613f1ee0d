"""Lower bounds of every stage that a segment of layers could be.

Memory is priced (a Lagrange multiplier in seconds per byte), which separates the layers. The best of a grid
of prices is kept.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from darts_parallel.cost import (
    SOLVER_MEMORY_TOLERANCE,
    Array,
    Bools,
    Index,
    OuterCosts,
    equal_rows,
    kept_bytes,
    prefix_sums,
)
from darts_parallel.exact._pareto import price_grids
from darts_parallel.exact.segments import StageSegments

MOST_BYTES = 1e30
"""Bytes of a strategy that is not allowed; finite, because a segment may hold no layer of a class."""


@dataclass(frozen=True)
class SegmentGrid:
    """The segments of one outer choice; segments of equal layers are treated once.

    R classes of layers, U distinct segments, S stage signatures (`OuterCosts.stage_signatures`).
    """

    costs: OuterCosts
    space_kind: str
    distinct: "DistinctSegments"
    members: Index
    """One layer of every class, `(R,)`."""
    stages: StageSegments
    """The segments of every stage, N."""

    @staticmethod
    def build(costs: OuterCosts, space_kind: str) -> "SegmentGrid":
        """Find the distinct segments."""
        members = np.unique(costs.layer_class, return_index=True)[1]
        stages = StageSegments.legal(costs.pp, costs.fused_to_previous)
        distinct = _distinct_segments(tuple(costs.layer_class.tolist()))
        return SegmentGrid(costs, space_kind, distinct, members, stages)

    @cached_property
    def _signatures(self) -> Array:
        """Kind of stage, micro-batches in flight and capacity of every signature, `(3, S)`."""
        return np.array(self.costs.stage_signatures[0]).T

    @cached_property
    def _kind(self) -> Index:
        """Kind of stage of every signature, `(S,)`."""
        return self._signatures[0].astype(np.int64)

    @cached_property
    def _capacity(self) -> Array:
        """Bytes that fit a stage of every signature, `(S,)`."""
        capacity = self._signatures[2]
        return capacity * (1 + SOLVER_MEMORY_TOLERANCE)

    @cached_property
    def _memory(self) -> Array:
        """Bytes of every class and strategy that add up over a stage, `(S, R, C)`."""
        in_flight = self._signatures[1]
        static = self.costs.static[self.members]
        activation = self.costs.activation[self.members]
        return kept_bytes(static, activation, in_flight[:, None, None])

    def lower_bounds(
        self,
        time: float = 0.0,
        sync: float = 0.0,
        per_iteration: float = 0.0,
    ) -> Array:
        """Bound `time * t + sync * y + per_iteration * o` of every stage and segment that fits the memory.

        Args:
            time: Weight of the seconds of one micro-batch, t.
            sync: Weight of the synchronisation seconds, y.
            per_iteration: Weight of the seconds that are paid once, o.

        Returns:
            Of `stages`, `(N,)`; infinite where no strategy fits.
        """
        costs = self.costs
        stages = self.stages
        objective = time * costs.time + sync * costs.sync
        objective = objective + per_iteration * costs.per_iteration
        objective = objective[:, self.members]
        # a strategy that a kind cannot run costs more than all layers, so it is never the least
        penalty = objective.max() * len(costs.layer_class)
        objective = objective + penalty * ~costs.kind_allowed[:, None, :]
        solve = self._priced if self.space_kind == "layerwise" else self._single_choices
        values = solve(objective[self._kind])
        signature = costs.stage_signatures[1][stages.stage]
        layers = values[signature, self.distinct.number[stages.first, stages.end]]
        reshard = time * costs.reshard.min(axis=(-1, -2))
        inside = prefix_sums(reshard, 2)
        kind = costs.stage_kind[stages.stage]
        between = inside[kind, stages.end] - inside[kind, stages.first + 1]
        layers = layers + between
        p2p = time * costs.p2p.min(axis=(-1, -2))
        return layers + stages.entering(p2p, costs.boundary_kind)

    @cached_property
    def _working(self) -> Array:
        """Working bytes that every distinct segment needs at least, `(U,)`."""
        least = self.costs.working[self.members].min(axis=1)
        held = np.where(self.distinct.counts > 0, least, 0.0)
        return held.max(axis=1)

    @cached_property
    def _fits(self) -> Bools:
        """Whether any strategies of a distinct segment fit a stage signature's memory, `(S, U)`.

        Every limit of the working bytes is tried that lets a layer keep less.
        """
        legal = self.costs.kind_allowed[self._kind][:, None, :]
        kept = np.where(legal, self._memory, MOST_BYTES)
        # what a layer keeps at least within a limit: strategies by working bytes, and the least so far
        working = self.costs.working[self.members]
        order = np.argsort(working, axis=1, kind="stable")
        working = np.take_along_axis(working, order, 1)
        kept = np.take_along_axis(kept, order[None], 2)
        kept = np.minimum.accumulate(kept, axis=2)
        better = np.diff(kept, axis=2, prepend=np.inf) < 0
        limits = np.unique(working[better.any(axis=0)])
        counts = self.distinct.counts.T
        fewest = np.full((len(kept), counts.shape[1]), np.inf)
        classes = np.arange(len(working))
        for limit in limits.tolist():
            within = (working <= limit).sum(axis=1)
            layers = kept[:, classes, np.maximum(within, 1) - 1]
            layers = np.where(within > 0, layers, MOST_BYTES)
            needed = layers @ counts + limit
            np.minimum(fewest, needed, out=fewest)
        return fewest <= self._capacity[:, None]

    def _priced(self, objective: Array) -> Array:
        """Return the best price bound of every distinct segment, `(S, U)`.

        Args:
            objective: Of every signature, class and strategy, `(S, R, C)`.
        """
        free = self._capacity[:, None] - self._working
        first = self.distinct.first
        end = self.distinct.end
        result = np.full(free.shape, np.inf)
        price_rows = price_grids(objective, self._memory)
        for row, (prices, fits) in enumerate(zip(price_rows, self._fits, strict=True)):
            mine = np.flatnonzero(fits)
            charged = prices[:, None, None] * self._memory[row].T
            layers = (objective[row].T + charged).min(axis=1)
            sums = prefix_sums(layers[:, self.costs.layer_class])
            before = sums.take(first[mine], axis=1)
            inside = sums.take(end[mine], axis=1) - before
            bounds = inside - prices[:, None] * free[row, mine]
            result[row, mine] = bounds.max(axis=0, initial=-np.inf)
        return result

    def _single_choices(self, objective: Array) -> Array:
        """Return the smallest value of any one strategy that fits, `(S, U)`; argument as of `_priced`."""
        counts = self.distinct.counts
        working = self.costs.working[self.members]
        largest = np.zeros((len(counts), working.shape[1]))
        for held, row in zip(counts.T, working, strict=True):
            needed = np.where(held[:, None] > 0, row, 0.0)
            np.maximum(largest, needed, out=largest)
        result = np.empty((len(objective), len(counts)))
        for row, capacity in enumerate(self._capacity):
            peak = counts @ self._memory[row] + largest
            values = counts @ objective[row]
            values = np.where(peak <= capacity, values, np.inf)
            result[row] = values.min(axis=1)
        return result


@dataclass(frozen=True)
class DistinctSegments:
    """Segments [i, j) by how many layers of every class they hold."""

    counts: Array
    """Layers of every class in every distinct segment, `(U, R)`."""
    number: Index
    """Distinct segment of layers [i, j), `(L + 1, L + 1)`; 0, the empty one, where i >= j."""
    first: Index
    """First layer of one segment of each, `(U,)`."""
    end: Index
    """Layer after the last one of that segment, `(U,)`."""


@lru_cache(maxsize=16)
def _distinct_segments(layer_class: tuple[int, ...]) -> DistinctSegments:
    """Find distinct segments; the outer choices of a problem share a few answers."""
    classes = np.unique(layer_class)
    one_hot = np.equal.outer(classes, np.array(layer_class))
    prefix = prefix_sums(one_hot.astype(float)).T
    counts = prefix[None, :] - prefix[:, None]
    counts = counts.clip(min=0)
    counts[np.tril_indices(len(prefix))] = 0
    rows = counts.reshape(-1, len(classes))
    number = equal_rows(rows)
    examples = np.unique(number, return_index=True)[1]
    first, end = np.divmod(examples, len(prefix))
    number = number.reshape(counts.shape[:2])
    return DistinctSegments(rows[examples], number, first, end)
