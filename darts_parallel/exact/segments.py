"""Cutting a chain of layers into stages, where the value of every possible stage is known.

Values of stages lie in an array `(K, L + 1, L + 1)`: `[k, i, j]` is that of stage k when it holds layers
[i, j), infinite where it cannot. Where few segments are left, they are a list instead (`StageSegments`). A
split takes one segment for every stage, in order and without a gap; its best ones are found by dynamic
programs over stages and boundaries (the linear partition problem, as PipeDream and DAPPLE use it).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class NodeGroups:
    """Segments sorted by the node that stands for them: segments of equal layers share one."""

    node: Index
    """Node of every segment, `(L + 1, L + 1)`; 0, the root, where there is none."""
    begins: Index
    """First layer of every segment, in the order of the nodes, `(S,)`."""
    stops: Index
    """Layer after the last one, `(S,)`."""
    first: Index
    """Place of every node's first segment, `(nodes - 1,)`."""

    @staticmethod
    def of(node: Index) -> "NodeGroups":
        """Sort the segments."""
        begins, stops = np.nonzero(node)
        order = np.argsort(node[begins, stops], kind="stable")
        begins, stops = begins[order], stops[order]
        return NodeGroups(node, begins, stops, _group_starts(node[begins, stops]))

    def largest(self, values: Array, root: float = 0.0) -> Array:
        """The largest value of every node's segments, `(S, ...)` to `(nodes, ...)`; `root` at the root."""
        found = np.maximum.reduceat(values, self.first, axis=0)
        return np.concatenate([np.full((1, *found.shape[1:]), root), found])

    def largest_of(self, some: NDArray[np.bool_], values: Array, none: float = 0.0) -> Array:
        """The same over the segments `some` `(S,)` alone, values `(sum, ...)`; `none` where there is none."""
        numbers = self.node[self.begins[some], self.stops[some]]
        result = np.full((len(self.first) + 1, *values.shape[1:]), none)
        if len(numbers):
            first = _group_starts(numbers)
            result[numbers[first]] = np.maximum.reduceat(values, first, axis=0)
        return result


@dataclass(frozen=True)
class StageSegments:
    """N segments that stages may hold, in the order of stages, ends and first layers.

    Values of segments are arrays `(N,)`. Short stages have few segments, and a limit leaves few of those.
    """

    num_stages: int
    num_layers: int
    stage: Index
    """Shape `(N,)`, as the next two."""
    first: Index
    end: Index

    @staticmethod
    def legal(num_stages: int, fused_to_previous: NDArray[np.bool_]) -> "StageSegments":
        """All that leave a layer to every other stage; none begins with a layer fused to the one before."""
        size = len(fused_to_previous)
        begins = ~np.append(fused_to_previous, False)
        last, offset = np.tril_indices(max(size - num_stages + 1, 0))
        stage = np.repeat(np.arange(num_stages), len(last))
        first, end = stage + np.tile(offset, num_stages), stage + np.tile(last, num_stages) + 1
        kept = begins[first] & begins[end] & ((first == 0) | (stage > 0))
        kept &= (end == size) | (stage < num_stages - 1)
        return StageSegments(num_stages, size, stage[kept], first[kept], end[kept])

    def __len__(self) -> int:
        return len(self.stage)

    def keep(self, kept: NDArray[np.bool_]) -> "StageSegments":
        """Only the segments `kept`, `(N,)`."""
        rows = (self.stage[kept], self.first[kept], self.end[kept])
        return StageSegments(self.num_stages, self.num_layers, *rows)

    def with_transitions(
        self, values: Array, stage_kind: Index, boundary_kind: Index, reshard: Array, p2p: Array
    ) -> Array:
        """Add to seconds of layers `(N,)` what lies between them, and the way into their stage.

        Args:
            values: Seconds of the layers of every segment.
            stage_kind: Of every stage, `(K,)`.
            boundary_kind: Of every boundary, `(K - 1,)`.
            reshard: Seconds between neighbours by kind of stage, `(Q, L - 1)`.
            p2p: Seconds between them across a boundary by its kind, `(P, L - 1)`.
        """
        kind, sums = stage_kind[self.stage], np.pad(np.cumsum(reshard, axis=1), ((0, 0), (2, 0)))
        # the pair (l, l + 1) counts for segments that hold both
        result: Array = values + (sums[kind, self.end] - sums[kind, self.first + 1])
        later = np.flatnonzero(self.stage > 0)
        border = boundary_kind[self.stage[later] - 1]
        result[later] += p2p[border, self.first[later] - 1]
        return result

    @cached_property
    def _by_first(self) -> Index:
        """The segments in the order of stages and first layers."""
        return np.argsort(self.stage * (self.num_layers + 1) + self.first, kind="stable")

    def before(self, values: Array, join: np.ufunc) -> Array:
        """Least sum (`np.add`) or maximum (`np.maximum`) of the first k stages on layers [0, j).

        Returns:
            Shape `(K + 1, L + 1)`; infinite where there is no way.
        """
        result = self._start(join, 0, 0)
        for k, rows, places, groups in self._to_ends:
            reached = join(result[k, self.first[rows]], values[rows])
            result[k + 1, places] = np.minimum.reduceat(reached, groups)
        return result

    def after(self, values: Array, join: np.ufunc) -> Array:
        """Least sum or maximum of the stages from k on when they hold layers [j, L); as `before`."""
        order = self._by_first
        end, values = self.end[order], values[order]
        result = self._start(join, self.num_stages, self.num_layers)
        for k, rows, places, groups in reversed(self._to_firsts):
            reached = join(values[rows], result[k + 1, end[rows]])
            result[k, places] = np.minimum.reduceat(reached, groups)
        return result

    @cached_property
    def _to_ends(self) -> list[tuple[int, slice, Index, Index]]:
        return self._steps(self.end)

    @cached_property
    def _to_firsts(self) -> list[tuple[int, slice, Index, Index]]:
        return self._steps(self.first[self._by_first])

    def _start(self, join: np.ufunc, stage: int, layer: int) -> Array:
        result = np.full((self.num_stages + 1, self.num_layers + 1), np.inf)
        result[stage, layer] = -np.inf if join is np.maximum else 0.0
        return result

    def _steps(self, places: Index) -> list[tuple[int, slice, Index, Index]]:
        """Every stage with its rows, the layers at which they meet, and where a new such layer begins."""
        starts = _group_starts(self.stage * (self.num_layers + 1) + places)
        rows = np.searchsorted(self.stage, np.arange(self.num_stages + 1)).tolist()
        groups = np.searchsorted(starts, rows).tolist()
        return [
            (k, slice(rows[k], rows[k + 1]), places[own], own - rows[k])
            for k in range(self.num_stages)
            if len(own := starts[groups[k] : groups[k + 1]])
        ]

    def least_sum(self, values: Array) -> float:
        """Smallest sum over stages of any split."""
        return float(self.before(values, np.add)[-1, -1])

    def least_maximum(self, values: Array) -> float:
        """Smallest maximum over stages of any split."""
        return float(self.before(values, np.maximum)[-1, -1])

    def split_below(self, values: Array, limit: float) -> tuple[float, list[int]]:
        """The split of least sum whose stages all stay within `limit`, as the function of this name."""
        small = values <= limit
        own, values = self.keep(small), values[small]
        reached = own.before(values, np.add)
        end, starts = self.num_layers, list[int]()
        if not np.isfinite(reached[-1, end]):
            return float("inf"), starts
        place = own.stage * (self.num_layers + 1) + own.end
        for k in range(self.num_stages - 1, -1, -1):
            first, last = np.searchsorted(place, k * (self.num_layers + 1) + end + np.arange(2))
            sums = reached[k, own.first[first:last]] + values[first:last]
            end = int(own.first[first + int(sums.argmin())])
            starts.append(end)
        return float(reached[-1, -1]), starts[::-1]

    def rising_limits(self, values: Array) -> Iterator[float]:
        """Values that the slowest stage of a split may have, from the least that any split reaches on."""
        limit = self.least_maximum(values)
        yield from np.unique(values[(values >= limit) & np.isfinite(values)]).tolist()


def _group_starts(numbers: Index) -> Index:
    """Places in rising numbers where a new one begins."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))


def prefix_sums(values: Array) -> Array:
    """Sums of the first values along the last axis, from 0: `(..., L)` to `(..., L + 1)`."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


def spans(values: Array) -> Array:
    """Sums over layers [i, j) of values `(..., L)`, shape `(..., L + 1, L + 1)`."""
    prefix = prefix_sums(values)
    return np.asarray(prefix[..., None, :] - prefix[..., :, None])


def segment_max(values: Array) -> Array:
    """Maxima over layers [i, j) of values `(L,)`, `(L + 1, L + 1)`; 0 where there are none."""
    size = len(values)
    result = np.zeros((size + 1, size + 1))
    for i in range(size):
        result[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return result


def best_sum(segments: Array) -> float:
    """Smallest sum over stages of any split."""
    return float(forward_sums(segments)[-1, -1])


def best_bottleneck(segments: Array) -> float:
    """Smallest maximum over stages of any split."""
    return float(forward_bottlenecks(segments)[-1, -1])


def forward_sums(segments: Array) -> Array:
    """Smallest sum of the first k stages when they hold layers [0, j), shape `(K + 1, L + 1)`."""
    result = _start(segments)
    for k, values in enumerate(segments):
        result[k + 1] = (result[k][:, None] + values).min(axis=0)
    return result


def forward_bottlenecks(segments: Array) -> Array:
    """Smallest maximum of the first k stages when they hold layers [0, j), shape `(K + 1, L + 1)`."""
    result = _start(segments)
    result[0, 0] = -np.inf
    for k, values in enumerate(segments):
        result[k + 1] = np.maximum(result[k][:, None], values).min(axis=0)
    return result


def _start(segments: Array) -> Array:
    result = np.full((len(segments) + 1, segments.shape[1]), np.inf)
    result[0, 0] = 0.0
    return result


def split_below(segments: Array, limit: float) -> tuple[float, list[int]]:
    """The split of least sum whose stages all stay within `limit`, where there is one.

    Returns:
        Its sum and the first layers of its stages; an infinite sum where there is none.
    """
    reached = np.full(segments.shape[1], np.inf)
    reached[0] = 0.0
    origins = []
    for values in np.where(segments <= limit, segments, np.inf):
        total = reached[:, None] + values
        origins.append(total.argmin(axis=0))
        reached = total.min(axis=0)
    end, starts = segments.shape[1] - 1, []
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return float(reached[-1]), starts[::-1]


def rising_limits(segments: Array, step: float = 0.0) -> Iterator[float]:
    """Values that the slowest stage of a split may have, from the least that any split reaches on.

    Args:
        segments: Of every stage.
        step: Relative distance that a value must have from the one before.
    """
    limit = best_bottleneck(segments)
    known = np.unique(segments[np.isfinite(segments)])
    while np.isfinite(limit):
        yield limit
        later = np.searchsorted(known, limit * (1 + step), side="right")
        limit = float(known[later]) if later < len(known) else np.inf


def largest(segments: Array, starts: list[int]) -> float:
    """The largest value of a stage of one split."""
    ends = [*starts[1:], -1]
    return float(max(segments[k, i, j] for k, (i, j) in enumerate(zip(starts, ends, strict=True))))
