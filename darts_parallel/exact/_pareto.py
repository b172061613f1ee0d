"""Dominance between labels, vectors better smaller in all entries, and the prices of memory on their hull."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import Array, Index

TOLERANCE = 1e-13
"""Relative; labels that differ only by the rounding of sums count as equal."""
CHUNK = 256
"""Labels compared at once."""


def pareto(
    values: Array, keys: Index | None = None, offsets: Array | None = None, paid: int = 1
) -> Index:
    """Return indices of the labels that no other dominates, one of each group of equals.

    Args:
        values: Labels, shape `(n, D)`.
        keys: State of every label, `(n,)`; None where there is one state only.
        offsets: What state b pays at most over state a, `(states, states)`, at least 0, with the
            triangle inequality: b dominates a if it still does after paying it.
        paid: Leading columns that pay it.

    Returns:
        Indices, in order of the sum of the normalised columns.
    """
    if len(values) < 2:
        return np.arange(len(values))
    low, high = values.min(axis=0), values.max(axis=0)
    slack = TOLERANCE * np.abs(values).max(axis=0)
    if keys is None or offsets is None or not offsets.any():
        keys, offsets, paid = None, None, 1
    varying = np.flatnonzero((high - low > slack) | (np.arange(values.shape[1]) < paid))
    points, slack, spread = (
        values[:, varying],
        slack[varying],
        np.maximum(high - low, slack)[varying],
    )
    if keys is None and points.shape[1] <= 2:
        return _staircase(points, slack)
    order = np.argsort(
        (points - low[varying]) @ (1.0 / np.where(spread > 0, spread, 1.0)), kind="stable"
    )
    rule = _Rule(points, slack, keys, offsets, paid)
    kept = order[:0]
    for begin in range(0, len(order), CHUNK):
        block = order[begin : begin + CHUNK]
        # the first labels dominate most, so that few are left to compare with the rest
        for piece in range(0, len(kept), CHUNK):
            block = block[~rule.dominated(kept[piece : piece + CHUNK], block)]
        block = block[~rule.dominated(block, block, earlier=True)]
        kept = np.concatenate([kept, block])
    return kept


@dataclass(frozen=True)
class _Rule:
    """When one label dominates another; fields as the arguments of `pareto`."""

    points: Array
    slack: Array
    keys: Index | None
    offsets: Array | None
    paid: int

    def dominated(self, better: Index, worse: Index, *, earlier: bool = False) -> NDArray[np.bool_]:
        """Return which of `worse` some of `better` dominates; with `earlier`, one before it in the list."""
        if not len(better) or not len(worse):
            return np.zeros(len(worse), dtype=bool)
        extra: Array | float = 0.0
        if self.keys is not None and self.offsets is not None:
            extra = self.offsets[self.keys[better]][:, self.keys[worse]]
        result = np.ones((len(better), len(worse)), dtype=bool)
        for d in range(self.points.shape[1]):
            value = self.points[better, d][:, None] + (extra if d < self.paid else 0.0)
            result &= value <= self.points[worse, d] + self.slack[d]
        if earlier:
            result &= np.triu(np.ones(result.shape, dtype=bool), 1)
        return np.asarray(result.any(axis=0))


def _staircase(points: Array, slack: Array) -> Index:
    """Find the undominated rows of one or two columns, by sorting."""
    if points.shape[1] == 1:
        return np.array([points[:, 0].argmin()])
    order = np.lexsort((points[:, 1], points[:, 0]))
    second = points[order, 1]
    best = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(order[second < best - slack[1]])


def price_grids(value: Array, memory: Array, limit: int = 24) -> list[Array]:
    """Return memory prices at which some layer's cheapest strategy changes, and 0, of S stages.

    Args:
        value: Seconds of every layer and strategy, `(S, R, C)`.
        memory: Bytes, the same shape.
        limit: Largest number of prices; more are thinned to quantiles.

    Returns:
        S rows of seconds per byte, rising, at most `limit + 1` in each.
    """
    stages, layers, size = value.shape
    rows = np.arange(stages * layers)
    value, memory = value.reshape(-1, size), memory.reshape(-1, size)
    # among the cheapest, the smallest: then walk the lower hull towards less memory
    current = np.lexsort((memory, value), axis=1)[:, 0]
    steps: list[Array] = [np.zeros(len(rows))]
    for _ in range(size):
        saved = memory[rows, current][:, None] - memory
        extra = value - value[rows, current][:, None]
        slope = np.where(saved > 0, extra / np.where(saved > 0, saved, 1.0), np.inf)
        best = slope.min(axis=1)
        if not np.isfinite(best).any():
            break
        steps.append(best)
        tied = np.where(slope <= best[:, None] * (1 + 1e-12), memory, np.inf)
        current = np.where(np.isfinite(best), tied.argmin(axis=1), current)
    own = np.stack(steps, axis=-1).reshape(stages, -1)
    return [_thinned(prices[np.isfinite(prices)], limit) for prices in own]


def price_grid(value: Array, memory: Array, limit: int = 24) -> Array:
    """Return the prices of one stage: `price_grids` of values and bytes `(R, C)`."""
    return price_grids(value[None], memory[None], limit)[0]


def _thinned(prices: Array, limit: int) -> Array:
    """Return the distinct prices, rising, at most `limit` or so of them."""
    found = np.unique(prices.clip(min=0.0))
    if len(found) <= limit:
        return found
    return np.asarray(found[np.unique(np.linspace(0, len(found) - 1, limit).round().astype(int))])
