"""Stages of many plans at once: contiguous splits of small sum under a limit on the slowest stage.

All rows have the same number of stages K and of layers L. For falling limits T the smallest sum S(T) of
stage seconds is found by dynamic programming over the stages, vectorised over the rows; each answer's own
maximum is the next limit, so that the points where S changes are visited one after the other. They end
where even the smallest maximum could no longer make up for the sum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.bounds import Array, Index

Bools = NDArray[np.bool_]
MOST_LIMITS = 24
"""Limits that are tried for one row."""
SLACK = 1e-12
"""Relative; sums that differ by rounding are equal."""


@dataclass(frozen=True)
class Rows:
    """B plans whose stage starts are wanted."""

    prefix: Array
    """Prefix sums of the seconds of layers on every stage, `(B, K, L + 1)`."""
    entry: Array
    """Seconds of the boundary before every stage, by its first layer, `(B, K, L + 1)`."""
    kept: Array
    """Prefix sums of bytes whatever is in flight, `(B, L + 1)`."""
    activation: Array
    """Prefix sums of bytes per micro-batch in flight, `(B, L + 1)`."""
    working: Array
    """Bytes of every layer, `(B, L)`."""
    flight: Array
    """Micro-batches in flight, `(B, K)`."""
    capacity: Array
    """Bytes, `(B, K)`."""
    sync: Array
    """Prefix sums of the synchronisation seconds of layers on every stage, `(B, K, L + 1)`."""
    later: Array
    """Micro-batches less one, `(B,)`."""
    fixed: Array
    """Seconds that every split pays, `(B,)`."""
    least_sync: Array
    """No split's largest synchronisation is smaller, `(B,)`."""
    ceiling: Array
    """Seconds above which a row is of no interest, `(B,)`."""
    most_sync: Array
    """Seconds that the synchronisation of a stage may take, `(B,)`."""

    def __len__(self) -> int:
        return len(self.prefix)

    def segments(self, starts: Bools) -> list[Array]:
        """Seconds of layers [i, j) by stage, K arrays `(B, L + 1, L + 1)`; infinite where illegal.

        Args:
            starts: Layers that may begin a stage, `(L + 1,)`.
        """
        size = self.prefix.shape[-1]
        empty = ~np.triu(np.ones((size, size), dtype=bool), 1)
        empty[~starts] = True
        largest = np.zeros((len(self), size, size))
        for first in range(size - 1):
            largest[:, first, first + 1 :] = np.maximum.accumulate(self.working[:, first:], axis=1)
        result = []
        for stage in range(self.prefix.shape[1]):
            seconds = self.prefix[:, stage]
            size_of = self.kept + self.flight[:, stage, None] * self.activation
            value = seconds[:, None, :] - (seconds - self.entry[:, stage])[:, :, None]
            peak = size_of[:, None, :] - size_of[:, :, None] + largest
            sync = self.sync[:, stage, None, :] - self.sync[:, stage, :, None]
            over = (peak > self.capacity[:, stage, None, None]) | (sync > self.most_sync[:, None, None])
            value[over | empty] = np.inf
            result.append(value)
        return result


@dataclass(frozen=True)
class Splits:
    """The best split of every row."""

    cost: Array
    """`sum + later * max + largest synchronisation + fixed`, seconds, `(B,)`; infinite where none fits."""
    sync: Array
    """Its largest synchronisation, `(B,)`."""
    starts: Index
    """First layer of every stage, `(B, K)`."""


def best_splits(rows: Rows, starts: Bools) -> Splits:
    """Splits of the smallest `sum + later * max + largest synchronisation + fixed`.

    A split is chosen for its sum and maximum; its synchronisation, within its limit, counts as it comes.

    Args:
        rows: Plans.
        starts: Layers that may begin a stage, `(L + 1,)`.
    """
    segments = rows.segments(starts)
    slowest = _bottleneck(segments)
    count, stages = rows.prefix.shape[:2]
    found = Splits(np.full(count, np.inf), np.full(count, np.inf), np.zeros((count, stages), dtype=np.int64))
    alive = np.flatnonzero(np.isfinite(slowest))
    # the smallest maximum first: a good answer, which narrows the limits worth trying
    _improve(found, rows, segments, alive, slowest[alive] * (1 + SLACK))
    limit = np.full(count, np.inf)
    for _ in range(MOST_LIMITS):
        if not len(alive):
            break
        total, reached = _improve(found, rows, segments, alive, limit[alive])
        # from here on the sum only grows, so that a larger maximum than this cannot win
        goal = np.minimum(found.cost[alive], rows.ceiling[alive]) * (1 - SLACK)
        spare = goal - total - rows.fixed[alive] - rows.least_sync[alive]
        with np.errstate(divide="ignore", invalid="ignore"):
            useful = np.where(
                rows.later[alive] > 0, spare / rows.later[alive], np.where(spare > 0, np.inf, 0.0)
            )
        limit[alive] = np.minimum(reached * (1 - SLACK), useful)
        alive = alive[limit[alive] > slowest[alive] * (1 + SLACK)]
    return found


def _improve(
    found: Splits, rows: Rows, segments: list[Array], which: Index, limit: Array
) -> tuple[Array, Array]:
    """Note the smallest sums of the rows `which` within limits; returns those sums and their maxima."""
    total, split = _least_sum([values[which] for values in segments], limit)
    reached, largest = _read(rows, segments, split, which)
    value = total + rows.fixed[which] + rows.later[which] * reached + largest
    better = value < found.cost[which]
    improved = which[better]
    found.cost[improved], found.sync[improved] = value[better], largest[better]
    found.starts[improved] = split[better]
    return total, reached


def _bottleneck(segments: list[Array]) -> Array:
    """Smallest possible maximum over stages, `(B,)`."""
    best = np.full(segments[0].shape[:2], np.inf)
    best[:, 0] = 0.0
    for values in segments:
        best = np.maximum(best[:, :, None], values).min(axis=1)
    return np.asarray(best[:, -1])


def _least_sum(segments: list[Array], limit: Array) -> tuple[Array, Index]:
    """Smallest sum of stages within the limit, `(B,)`, and its stage starts, `(B, K)`."""
    count, size = segments[0].shape[:2]
    best = np.full((count, size), np.inf)
    best[:, 0] = 0.0
    back = []
    for values in segments:
        total = np.where(values <= limit[:, None, None], values, np.inf) + best[:, :, None]
        back.append(total.argmin(axis=1))
        best = np.take_along_axis(total, back[-1][:, None], axis=1)[:, 0]
    starts = np.zeros((count, len(segments)), dtype=np.int64)
    end, row = np.full(count, size - 1), np.arange(count)
    for stage in reversed(range(len(segments))):
        end = back[stage][row, end]
        starts[:, stage] = end
    return best[:, -1], starts


def _read(rows: Rows, segments: list[Array], starts: Index, which: Index) -> tuple[Array, Array]:
    """Slowest stage and largest synchronisation of splits of the rows `which`, each `(B,)`."""
    last = np.full((len(starts), 1), rows.prefix.shape[-1] - 1)
    ends = np.concatenate([starts[:, 1:], last], axis=1)
    seconds = [values[which, starts[:, k], ends[:, k]] for k, values in enumerate(segments)]
    stage = np.arange(starts.shape[1])
    sync = rows.sync[which[:, None], stage, ends] - rows.sync[which[:, None], stage, starts]
    return np.max(seconds, axis=0), sync.max(axis=1)
