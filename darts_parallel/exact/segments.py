"""Splitting layers into stages, where the value of every possible stage is known.

Segments are a list (`StageSegments`): stage k holds layers [i, j), for every k, i and j that are possible.
A split takes one segment for every stage, in order and without a gap. The best splits are found by dynamic
programmes over stages and boundaries (the linear partition problem, as PipeDream and DAPPLE use it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from darts_parallel.cost import Array, Bools, Index, prefix_sums
from darts_parallel.exact.result import DeadlineError

MAX_SEGMENTS = 4_000_000
"""Segments that are worth their time and memory; a chain of 370 layers has fewer at any pipeline degree."""


def too_many_segments(num_stages: int, num_layers: int) -> bool:
    """Return whether stages may hold more than `MAX_SEGMENTS` segments, each with a stage of its own."""
    spare = num_layers - num_stages + 1
    return num_stages * spare * (spare + 1) // 2 > MAX_SEGMENTS


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
        begins = begins[order]
        stops = stops[order]
        return NodeGroups(node, begins, stops, _group_starts(node[begins, stops]))

    def largest(self, values: Array) -> Array:
        """Return the largest value of each node's segments, `(S, ...)` to `(nodes, ...)`; 0 of the root."""
        found = np.maximum.reduceat(values, self.first, axis=0)
        return np.concatenate([np.zeros_like(found[:1]), found])

    def largest_of(self, some: Bools, values: Array, none: float = 0.0) -> Array:
        """Return the largest values over the segments `some` `(S,)` alone; `none` where there is none."""
        numbers = self.node[self.begins[some], self.stops[some]]
        nodes = len(self.first) + 1
        result = np.full((nodes, *values.shape[1:]), none)
        if len(numbers):
            first = _group_starts(numbers)
            largest = np.maximum.reduceat(values, first, axis=0)
            result[numbers[first]] = largest
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
    def legal(num_stages: int, fused_to_previous: Bools) -> "StageSegments":
        """Return segments that leave a layer to every other stage; `DeadlineError` above `MAX_SEGMENTS`."""
        if too_many_segments(num_stages, len(fused_to_previous)):
            raise DeadlineError
        return _legal(num_stages, fused_to_previous.tobytes())

    def __len__(self) -> int:
        return len(self.stage)

    def keep(self, kept: Bools) -> "StageSegments":
        """Select the segments `kept`, `(N,)`."""
        stage = self.stage[kept]
        return replace(self, stage=stage, first=self.first[kept], end=self.end[kept])

    def sums(self, values: Array, row: Index) -> Array:
        """Return sums over the layers of every segment.

        Args:
            values: Of every layer in R rows, `(R, L)`.
            row: That of every stage, `(K,)`.
        """
        sums = prefix_sums(values)
        rows = row[self.stage]
        before = sums[rows, self.first]
        return sums[rows, self.end] - before

    def entering(self, p2p: Array, boundary_kind: Index) -> Array:
        """Return the seconds of the way into every segment's stage, 0 for the first stage.

        Args:
            p2p: Seconds between neighbours across a boundary by its kind, `(P, L - 1, ...)`.
            boundary_kind: Of every boundary, `(K - 1,)`.
        """
        result = np.zeros((len(self), *p2p.shape[2:]))
        later = np.flatnonzero(self.stage > 0)
        kind = boundary_kind[self.stage[later] - 1]
        result[later] = p2p[kind, self.first[later] - 1]
        return result

    def rows_of(self, starts: Index | list[int]) -> Index:
        """Return rows of the segments of splits, `(..., K)`; they are made of segments that are here."""
        first = np.asarray(starts)
        shape = (*first.shape[:-1], 1)
        last = np.full(shape, self.num_layers)
        end = np.concatenate([first[..., 1:], last], axis=-1)
        stage = np.arange(self.num_stages)
        wanted = self._rank(stage, end, first)
        known = self._rank(self.stage, self.end, self.first)
        return np.searchsorted(known, wanted)

    def _rank(self, stage: Index, end: Index, first: Index) -> Index:
        """Return numbers that rise in the order of segments."""
        size = self.num_layers + 1
        return (stage * size + end) * size + first

    def before(self, values: Array, join: np.ufunc) -> Array:
        """Return the least sum (`np.add`) or maximum (`np.maximum`) of the first k stages on layers [0, j).

        Args:
            values: Of every segment, `(N, ...)`.

        Returns:
            Shape `(K + 1, L + 1, ...)`; infinite where there is no way.
        """
        shape = (self.num_stages + 1, self.num_layers + 1, *values.shape[1:])
        result = np.full(shape, np.inf)
        result[0, 0] = -np.inf if join is np.maximum else 0.0
        for step in self._steps:
            known = result[step.stage, self.first[step.rows]]
            reached = join(known, values[step.rows])
            best = np.minimum.reduceat(reached, step.groups, axis=0)
            result[step.stage + 1, step.layers] = best
        return result

    def after(self, values: Array, join: np.ufunc) -> Array:
        """Return the least sum or maximum of stages from k on that hold layers [j, L); as `before`."""
        backwards = values[self._backwards]
        mirrored = self._mirrored.before(backwards, join)
        return mirrored[::-1, ::-1]

    @cached_property
    def _backwards(self) -> Index:
        """Return the segments in the falling order of stages and first layers."""
        places = self.stage * (self.num_layers + 1) + self.first
        return np.argsort(-places, kind="stable")

    @cached_property
    def _mirrored(self) -> "StageSegments":
        """Return the segments `_backwards`, with stages and layers counted from the last one."""
        order = self._backwards
        stage = self.num_stages - 1 - self.stage[order]
        first = self.num_layers - self.end[order]
        end = self.num_layers - self.first[order]
        return replace(self, stage=stage, first=first, end=end)

    @cached_property
    def _steps(self) -> "list[_StageStep]":
        """Return the segments of every stage in groups that end at one layer."""
        starts = _group_starts(self.stage * (self.num_layers + 1) + self.end)
        stages = np.arange(self.num_stages + 1)
        rows = np.searchsorted(self.stage, stages).tolist()
        places = np.searchsorted(starts, rows).tolist()
        steps = []
        for stage in range(self.num_stages):
            mine = starts[places[stage] : places[stage + 1]]
            if len(mine):
                first = rows[stage]
                some = slice(first, rows[stage + 1])
                steps.append(_StageStep(stage, some, self.end[mine], mine - first))
        return steps

    def least_sum(self, values: Array) -> float:
        """Return the smallest sum over stages of any split."""
        return float(self.before(values, np.add)[-1, -1])

    def least_maximum(self, values: Array) -> float:
        """Return the smallest maximum over stages of any split."""
        return float(self.before(values, np.maximum)[-1, -1])

    def even_split(self, values: Array) -> list[int]:
        """Return the first layers of a split whose largest value is as small as it can be."""
        return self.split_below(values, self.least_maximum(values))[1]

    def split_below(self, values: Array, limit: float) -> tuple[float, list[int]]:
        """Return the split of least sum whose stages all stay within `limit`, where there is one.

        Returns:
            Its sum and the first layers of its stages; an infinite sum and no layer where there is none.
        """
        return self.splits_below(values, [limit])[0]

    def splits_below(
        self,
        values: Array,
        limits: Sequence[float],
    ) -> list[tuple[float, list[int]]]:
        """Return `split_below` of several limits."""
        valuations = values[:, None]
        valuations = np.where(valuations <= np.array(limits), valuations, np.inf)
        sums, starts = self.least_sums(valuations)
        rows = zip(sums.tolist(), starts.tolist(), strict=True)
        return [(least, row if np.isfinite(least) else []) for least, row in rows]

    def least_sums(self, values: Array) -> tuple[Array, Index]:
        """Return the least sums of splits under B valuations `(N, B)`, and their first layers `(B, K)`.

        Sums are infinite, and the layers without meaning, where there is no split.
        """
        count = values.shape[1]
        size = self.num_layers + 1
        reached = self.before(values, np.add)
        total = reached[-1, -1]
        starts = np.zeros((count, self.num_stages), dtype=np.int64)
        if not np.isfinite(total).any():
            return total, starts
        # segments of a stage that end at one layer are neighbours
        ends = np.arange(self.num_stages * size + 1)
        rows = np.searchsorted(self.stage * size + self.end, ends)
        column = np.arange(count)
        end = np.full(count, self.num_layers)
        for stage in reversed(range(self.num_stages)):
            place = stage * size + end
            low = rows[place, None]
            high = rows[place + 1, None]
            longest = int((high - low).max())
            some = low + np.arange(longest)
            some = np.minimum(some, len(self) - 1)
            sums = reached[stage, self.first[some], column[:, None]]
            sums = sums + values[some, column[:, None]]
            sums = np.where(some < high, sums, np.inf)
            chosen = sums.argmin(axis=1)
            end = self.first[some[column, chosen]]
            starts[:, stage] = end
        return total, starts

    def rising_limits(self, values: Array, step: float = 0.0) -> Iterator[float]:
        """Return values that the slowest stage of a split may have, from the least that any split reaches on.

        Args:
            step: Relative distance that a value must have from the one before.
        """
        limit = self.least_maximum(values)
        while np.isfinite(limit):
            yield limit
            larger = values[values > limit * (1 + step)]
            limit = float(larger.min(initial=np.inf))


@dataclass(frozen=True)
class _StageStep:
    """Segments of one stage, sorted by the layer at which they meet the next stage."""

    stage: int
    rows: slice
    """Rows of its segments."""
    layers: Index
    """Layers at which segments meet, `(G,)`."""
    groups: Index
    """First row of each layer's segments, counted from the stage's first, `(G,)`."""


@lru_cache(maxsize=64)
def _legal(num_stages: int, fused_to_previous: bytes) -> StageSegments:
    """Return legal segments: all outer choices of a pipeline degree share them and their caches."""
    fused = np.frombuffer(fused_to_previous, dtype=np.bool_)
    size = len(fused)
    begins = ~np.append(fused, False)
    last, offset = np.tril_indices(max(size - num_stages + 1, 0))
    stage = np.repeat(np.arange(num_stages), len(last))
    first = stage + np.tile(offset, num_stages)
    end = stage + np.tile(last, num_stages) + 1
    kept = begins[first] & begins[end]
    kept &= (first == 0) | (stage > 0)
    kept &= (end == size) | (stage < num_stages - 1)
    return StageSegments(num_stages, size, stage[kept], first[kept], end[kept])


def _group_starts(numbers: Index) -> Index:
    """Return the positions in rising numbers where a new one begins."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))
