"""Stages of many plans at once: contiguous splits of small sum under a limit on the slowest stage.

All rows have the same number of stages K and of layers L. For falling limits T the smallest sum S(T) of
stage seconds is found by dynamic programming over the stages, vectorised over the rows; each answer's own
maximum is the next limit, so that the points where S changes are visited one after the other. They end
where even the smallest maximum could no longer make up for the sum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.exact.segments import Array, Index

Bools = NDArray[np.bool_]
MOST_LIMITS = 24
"""Limits that are tried for one row."""
TOLERANCE = 1e-12
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
    in_flight: Array
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

    @property
    def num_layers(self) -> int:
        """Return layers, L."""
        return int(self.working.shape[1])

    def segments(self, starts: Bools) -> list[Array]:
        """Return the seconds of layers [i, j) by stage, K arrays `(B, I, J)`; infinite where illegal.

        Only what a stage can hold is there: every other one keeps a layer at least, so that stage k begins at
        layers k to L - K + k, which are the ends of stage k - 1; the first begins at 0, the last ends at L.

        Args:
            starts: Layers that may begin a stage, `(L + 1,)`.
        """
        stages, layers = self.prefix.shape[1], self.num_layers
        spare = layers - stages
        largest = self._largest_working(0 if stages == 1 else layers - 1)
        result = []
        for stage in range(stages):
            begin = np.arange(stage, (0 if stage == 0 else spare + stage) + 1)
            end = np.arange(layers if stage == stages - 1 else stage + 1, spare + stage + 2)
            seconds, sync = self.prefix[:, stage], self.sync[:, stage]
            size_of = self.kept + self.in_flight[:, stage, None] * self.activation
            value = seconds[:, None, end] - (seconds - self.entry[:, stage])[:, begin, None]
            peak = size_of[:, None, end] - size_of[:, begin, None]
            peak += largest[:, begin[0] : begin[-1] + 1, end[0] : end[-1] + 1]
            over = peak > self.capacity[:, stage, None, None] * (1 + TOLERANCE)
            if np.isfinite(self.most_sync).any():
                over |= sync[:, None, end] - sync[:, begin, None] > self.most_sync[:, None, None]
            over |= (begin[:, None] >= end) | ~starts[begin, None]
            value[over] = np.inf
            result.append(value)
        return result

    def _largest_working(self, last: int) -> Array:
        """Return the largest working bytes of layers [i, j) for i up to `last`, `(B, last + 1, L + 1)`."""
        largest = np.zeros((len(self), last + 1, self.num_layers + 1))
        for first in range(last + 1):
            np.maximum.accumulate(self.working[:, first:], axis=1, out=largest[:, first, first + 1 :])
        return largest


@dataclass(frozen=True)
class Splits:
    """The best split of every row."""

    cost: Array
    """`sum + later * max + largest synchronisation + fixed`, seconds, `(B,)`; infinite where none fits."""
    sync: Array
    """Its largest synchronisation, `(B,)`."""
    first_layers: Index
    """First layer of every stage, `(B, K)`."""


def best_splits(rows: Rows, starts: Bools) -> Splits:
    """Return splits of the smallest `sum + later * max + largest synchronisation + fixed`.

    A split is chosen for its sum and maximum; its synchronisation, within its limit, counts as it comes.

    Args:
        rows: Plans.
        starts: Layers that may begin a stage, `(L + 1,)`.
    """
    count, stages = rows.prefix.shape[:2]
    found = Splits(np.full(count, np.inf), np.full(count, np.inf), np.zeros((count, stages), dtype=np.int64))
    if stages > rows.num_layers:
        return found
    segments = rows.segments(starts)
    slowest = _bottleneck(segments)
    alive = np.flatnonzero(np.isfinite(slowest))
    # the smallest maximum first: a good answer, which narrows the limits worth trying
    _improve(found, rows, segments, alive, slowest[alive] * (1 + TOLERANCE))
    limit = np.full(count, np.inf)
    for _ in range(MOST_LIMITS):
        if not len(alive):
            break
        total, reached = _improve(found, rows, segments, alive, limit[alive])
        # from here on the sum only grows, so that a larger maximum than this cannot win
        goal = np.minimum(found.cost[alive], rows.ceiling[alive]) * (1 - TOLERANCE)
        spare = goal - total - rows.fixed[alive] - rows.least_sync[alive]
        with np.errstate(divide="ignore", invalid="ignore"):
            useful = np.where(
                rows.later[alive] > 0, spare / rows.later[alive], np.where(spare > 0, np.inf, 0.0)
            )
        limit[alive] = np.minimum(reached * (1 - TOLERANCE), useful)
        alive = alive[limit[alive] > slowest[alive] * (1 + TOLERANCE)]
    return found


def _improve(
    found: Splits, rows: Rows, segments: list[Array], which: Index, limit: Array
) -> tuple[Array, Array]:
    """Note the smallest sums of the rows `which` within limits; returns those sums and their maxima."""
    total, split = _least_sum(segments, which, limit)
    reached, largest = _read(rows, segments, split, which)
    value = total + rows.fixed[which] + rows.later[which] * reached + largest
    better = value < found.cost[which]
    improved = which[better]
    found.cost[improved], found.sync[improved] = value[better], largest[better]
    found.first_layers[improved] = split[better]
    return total, reached


def _bottleneck(segments: list[Array]) -> Array:
    """Return the smallest possible maximum over stages, `(B,)`."""
    best = np.zeros((len(segments[0]), 1))
    for values in segments:
        best = np.maximum(best[:, :, None], values).min(axis=1)
    return np.asarray(best[:, 0])


def _least_sum(segments: list[Array], which: Index, limit: Array) -> tuple[Array, Index]:
    """Return the least sums of stages of the rows `which` within the limit, `(B',)`, and starts `(B', K)`."""
    count = len(which)
    every = count == len(segments[0])
    best, most = np.zeros((count, 1)), limit[:, None, None]
    back = []
    for values in segments:
        own = values if every else values[which]
        total = np.where(own <= most, own, np.inf)
        total += best[:, :, None]
        back.append(total.argmin(axis=1))
        best = total.min(axis=1)
    starts = np.zeros((count, len(segments)), dtype=np.int64)
    place, row = np.zeros(count, dtype=np.int64), np.arange(count)
    for stage in reversed(range(len(segments))):
        # the ends of a stage are the starts of the next one
        place = back[stage][row, place]
        starts[:, stage] = place + stage
    return best[:, 0], starts


def _read(rows: Rows, segments: list[Array], starts: Index, which: Index) -> tuple[Array, Array]:
    """Return the slowest stage and largest synchronisation of splits of the rows `which`, each `(B',)`."""
    stage = np.arange(starts.shape[1])
    ends = np.concatenate([starts[:, 1:], np.full((len(starts), 1), rows.num_layers)], axis=1)
    begin, end = starts - stage, ends - (stage + 1)
    end[:, -1] = 0
    seconds = [values[which, begin[:, k], end[:, k]] for k, values in enumerate(segments)]
    sync = rows.sync[which[:, None], stage, ends] - rows.sync[which[:, None], stage, starts]
    return np.max(seconds, axis=0), sync.max(axis=1)
