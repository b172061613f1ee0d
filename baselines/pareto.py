"""Dominance between labels: vectors of which all entries are better smaller."""

import numpy as np

from darts_parallel.bounds import Array, Index

TOLERANCE = 1e-13
"""Relative; labels that differ only by the rounding of sums count as equal."""


def pareto(values: Array, keys: Index | None = None, offsets: Array | None = None, chunk: int = 192) -> Index:
    """Indices of the labels that no other dominates, one of each group of equals.

    Args:
        values: Labels, shape `(n, D)`.
        keys: State of every label, `(n,)`; None where there is one state only.
        offsets: What state b pays at most over state a in the first column, `(states, states)`, at
            least 0, with the triangle inequality: b dominates a if it still does after paying it.
        chunk: Labels compared at once.

    Returns:
        Indices, in order of the sum of the normalised columns.
    """
    if len(values) < 2:
        return np.arange(len(values))
    low, high = values.min(axis=0), values.max(axis=0)
    slack = TOLERANCE * np.abs(values).max(axis=0)
    varying = np.flatnonzero((high - low > slack) | (np.arange(values.shape[1]) == 0))
    points, slack, spread = values[:, varying], slack[varying], np.maximum(high - low, slack)[varying]
    if keys is None or offsets is None or not offsets.any():
        keys = None
        if points.shape[1] <= 2:
            return _staircase(points, slack)
    order = np.argsort((points - low[varying]) @ (1.0 / np.where(spread > 0, spread, 1.0)), kind="stable")
    kept = order[:0]
    for begin in range(0, len(order), chunk):
        block = order[begin : begin + chunk]
        block = block[~_dominated(points, slack, kept, block, keys, offsets, earlier=False)]
        block = block[~_dominated(points, slack, block, block, keys, offsets, earlier=True)]
        kept = np.concatenate([kept, block])
    return kept


def _dominated(
    points: Array,
    slack: Array,
    better: Index,
    worse: Index,
    keys: Index | None,
    offsets: Array | None,
    *,
    earlier: bool,
) -> np.ndarray:
    """Which of `worse` some of `better` dominates; with `earlier`, one before it in the same list."""
    if not len(better) or not len(worse):
        return np.zeros(len(worse), dtype=bool)
    first = points[better, 0][:, None]
    if keys is not None and offsets is not None:
        first = first + offsets[keys[better][:, None], keys[worse]]
    result = first <= points[worse, 0] + slack[0]
    for d in range(1, points.shape[1]):
        result &= points[better, d][:, None] <= points[worse, d] + slack[d]
    if earlier:
        result &= np.triu(np.ones(result.shape, dtype=bool), 1)
    return np.asarray(result.any(axis=0))


def _staircase(points: Array, slack: Array) -> Index:
    """The same for one or two columns, by sorting."""
    if points.shape[1] == 1:
        return np.array([points[:, 0].argmin()])
    order = np.lexsort((points[:, 1], points[:, 0]))
    second = points[order, 1]
    best = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(order[second < best - slack[1]])
