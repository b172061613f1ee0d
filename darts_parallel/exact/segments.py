"""Cutting a chain of layers into stages, where the value of every possible stage is known.

Values of stages lie in an array `(K, L + 1, L + 1)`: `[k, i, j]` is that of stage k when it holds layers
[i, j), infinite where it cannot. A split takes one segment for every stage, in order and without a gap; its
best ones are found by dynamic programs over stages and boundaries (the linear partition problem, as
PipeDream and DAPPLE use it).
"""

from collections.abc import Iterator
from dataclasses import dataclass

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

    def largest_of(self, some: NDArray[np.bool_], values: Array) -> Array:
        """The same over the segments `some` `(S,)` alone, whose values are `(sum, ...)`; 0 without any."""
        numbers = self.node[self.begins[some], self.stops[some]]
        result = np.zeros((len(self.first) + 1, *values.shape[1:]))
        if len(numbers):
            first = _group_starts(numbers)
            result[numbers[first]] = np.maximum.reduceat(values, first, axis=0)
        return result


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
