"""Cutting a chain of layers into stages, where the value of every possible stage is known.

Segments are a list (`StageSegments`): stage k holds layers [i, j), for every k, i and j that are possible.
A split takes one segment for every stage, in order and without a gap; its best ones are found by dynamic
programs over stages and boundaries (the linear partition problem, as PipeDream and DAPPLE use it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import Array, Index, prefix_sums
from darts_parallel.exact.result import DeadlineError

MAX_SEGMENTS = 4_000_000
"""Segments that are worth their time and memory; a chain of 370 layers has fewer at any pipeline degree."""


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
        """Return the largest value of each node's segments, `(S, ...)` to `(nodes, ...)`; `root` first."""
        found = np.maximum.reduceat(values, self.first, axis=0)
        return np.concatenate([np.full((1, *found.shape[1:]), root), found])

    def largest_of(self, some: NDArray[np.bool_], values: Array, none: float = 0.0) -> Array:
        """Return the largest values over the segments `some` `(S,)` alone; `none` where there is none."""
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
        """Return segments that leave a layer to every other stage; `DeadlineError` above `MAX_SEGMENTS`."""
        spare = len(fused_to_previous) - num_stages + 1
        if num_stages * spare * (spare + 1) // 2 > MAX_SEGMENTS:
            raise DeadlineError
        return _legal(num_stages, fused_to_previous.tobytes())

    def __len__(self) -> int:
        return len(self.stage)

    def keep(self, kept: NDArray[np.bool_]) -> "StageSegments":
        """Select the segments `kept`, `(N,)`."""
        rows = (self.stage[kept], self.first[kept], self.end[kept])
        return StageSegments(self.num_stages, self.num_layers, *rows)

    def sums(self, values: Array, row: Index) -> Array:
        """Return sums over the layers of every segment.

        Args:
            values: Of every layer in R rows, `(R, L)`.
            row: That of every stage, `(K,)`.
        """
        prefix, own = prefix_sums(values), row[self.stage]
        return np.asarray(prefix[own, self.end] - prefix[own, self.first])

    def entering(self, p2p: Array, boundary_kind: Index) -> Array:
        """Return the seconds of the way into every segment's stage, 0 for the first stage.

        Args:
            p2p: Seconds between neighbours across a boundary by its kind, `(P, L - 1, ...)`.
            boundary_kind: Of every boundary, `(K - 1,)`.
        """
        result, later = np.zeros((len(self), *p2p.shape[2:])), np.flatnonzero(self.stage > 0)
        result[later] = p2p[boundary_kind[self.stage[later] - 1], self.first[later] - 1]
        return result

    def rows_of(self, starts: Index | list[int]) -> Index:
        """Return rows of the segments of splits, `(..., K)`; they are made of segments that are here."""
        first, size = np.asarray(starts), self.num_layers + 1
        ends = np.concatenate(
            [first[..., 1:], np.full((*first.shape[:-1], 1), self.num_layers)], axis=-1
        )
        known = (self.stage * size + self.end) * size + self.first
        return np.asarray(
            np.searchsorted(known, (np.arange(self.num_stages) * size + ends) * size + first)
        )

    @cached_property
    def _by_first(self) -> Index:
        """Return the segments in the order of stages and first layers."""
        return np.argsort(self.stage * (self.num_layers + 1) + self.first, kind="stable")

    def before(self, values: Array, join: np.ufunc) -> Array:
        """Return the least sum (`np.add`) or maximum (`np.maximum`) of the first k stages on layers [0, j).

        Args:
            values: Of every segment, `(N, ...)`.

        Returns:
            Shape `(K + 1, L + 1, ...)`; infinite where there is no way.
        """
        result = self._start(join, 0, 0, values.shape[1:])
        for k, rows, places, groups in self._to_ends:
            reached = join(result[k, self.first[rows]], values[rows])
            result[k + 1, places] = np.minimum.reduceat(reached, groups, axis=0)
        return result

    def after(self, values: Array, join: np.ufunc) -> Array:
        """Return the least sum or maximum of stages from k on that hold layers [j, L); as `before`."""
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

    def _start(self, join: np.ufunc, stage: int, layer: int, more: tuple[int, ...] = ()) -> Array:
        result = np.full((self.num_stages + 1, self.num_layers + 1, *more), np.inf)
        result[stage, layer] = -np.inf if join is np.maximum else 0.0
        return result

    def _steps(self, places: Index) -> list[tuple[int, slice, Index, Index]]:
        """Yield every stage with its rows, the layers at which they meet, and where a new one begins."""
        starts = _group_starts(self.stage * (self.num_layers + 1) + places)
        rows = np.searchsorted(self.stage, np.arange(self.num_stages + 1)).tolist()
        groups = np.searchsorted(starts, rows).tolist()
        owned = [(k, starts[groups[k] : groups[k + 1]]) for k in range(self.num_stages)]
        return [
            (k, slice(rows[k], rows[k + 1]), places[own], own - rows[k])
            for k, own in owned
            if len(own)
        ]

    def least_sum(self, values: Array) -> float:
        """Return the smallest sum over stages of any split."""
        return float(self.before(values, np.add)[-1, -1])

    def least_maximum(self, values: Array) -> float:
        """Return the smallest maximum over stages of any split."""
        return float(self.before(values, np.maximum)[-1, -1])

    def split_below(self, values: Array, limit: float) -> tuple[float, list[int]]:
        """Return the split of least sum whose stages all stay within `limit`, where there is one.

        Returns:
            Its sum and the first layers of its stages; an infinite sum and no layer where there is none.
        """
        return self.splits_below(values, [limit])[0]

    def splits_below(self, values: Array, limits: Sequence[float]) -> list[tuple[float, list[int]]]:
        """Return `split_below` of several limits; close ones share most segments, and one program."""
        small = values <= max(limits)
        own, values = (self, values) if small.all() else (self.keep(small), values[small])
        total, starts = own.least_sums(
            np.where(values[:, None] <= np.array(limits), values[:, None], np.inf)
        )
        rows = zip(total.tolist(), starts.tolist(), strict=True)
        return [(least, row if np.isfinite(least) else []) for least, row in rows]

    def least_sums(self, values: Array) -> tuple[Array, Index]:
        """Return the least sums of splits under B valuations `(N, B)`, and their first layers `(B, K)`.

        Sums are infinite, and the layers without meaning, where there is no split.
        """
        reached, count, size = self.before(values, np.add), values.shape[1], self.num_layers + 1
        total, starts = reached[-1, -1], np.zeros((count, self.num_stages), dtype=np.int64)
        if not np.isfinite(total).any():
            return total, starts
        rows = np.searchsorted(self.stage * size + self.end, np.arange(self.num_stages * size + 1))
        column, end = np.arange(count), np.full(count, self.num_layers)
        for k in range(self.num_stages - 1, -1, -1):
            low, high = rows[k * size + end, None], rows[k * size + end + 1, None]
            own = np.minimum(low + np.arange((high - low).max()), len(self) - 1)
            sums = reached[k, self.first[own], column[:, None]] + values[own, column[:, None]]
            chosen = np.where(own < high, sums, np.inf).argmin(axis=1)
            starts[:, k] = end = self.first[own[column, chosen]]
        return total, starts

    def rising_limits(self, values: Array, step: float = 0.0) -> Iterator[float]:
        """Return values that the slowest stage of a split may have, from the least that any split reaches on.

        Args:
            step: Relative distance that a value must have from the one before.
        """
        limit = self.least_maximum(values)
        while np.isfinite(limit):
            yield limit
            limit = float(values[values > limit * (1 + step)].min(initial=np.inf))


@lru_cache(maxsize=64)
def _legal(num_stages: int, fused_to_previous: bytes) -> StageSegments:
    """Return legal segments: all outer choices of a pipeline degree share them, and what they remember."""
    fused = np.frombuffer(fused_to_previous, dtype=np.bool_)
    size, begins = len(fused), ~np.append(fused, False)
    last, offset = np.tril_indices(max(size - num_stages + 1, 0))
    stage = np.repeat(np.arange(num_stages), len(last))
    first, end = stage + np.tile(offset, num_stages), stage + np.tile(last, num_stages) + 1
    kept = begins[first] & begins[end] & ((first == 0) | (stage > 0))
    kept &= (end == size) | (stage < num_stages - 1)
    return StageSegments(num_stages, size, stage[kept], first[kept], end[kept])


def _group_starts(numbers: Index) -> Index:
    """Return the positions in rising numbers where a new one begins."""
    return np.flatnonzero(np.diff(numbers, prepend=-1))
