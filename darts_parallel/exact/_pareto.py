"""Dominance between labels (vectors whose smaller entries are better) and prices of memory."""

from dataclasses import dataclass
from importlib import import_module

import numpy as np

from darts_parallel.cost import GAIN_TOLERANCE, LABEL_TOLERANCE, Array, Bools, Index

CHUNK = 256
"""Labels that are compared with later ones at once."""
EARLIER = np.triu(np.ones((CHUNK, CHUNK), dtype=bool), 1)
"""Whether a label of one block comes before another."""
MANY = 4096
"""Labels above which compiled code compares them; bounds the memory of a comparison."""
MAX_PRICES = 24
"""Prices of a bound by default; more tighten it little."""


def pareto(
    values: Array,
    keys: Index | None = None,
    offsets: Array | None = None,
    paid: int = 1,
) -> Index:
    """Return indices of the labels that no other dominates, one of each group of equals.

    Args:
        values: Labels, shape `(n, D)`.
        keys: State of every label, `(n,)`; None where there is one state only.
        offsets: Most that a label of state b costs above one of state a later on, `(states, states)`. At
            least 0, with the triangle inequality. A label of b dominates one of a if it does so with the
            offset added.
        paid: Leading columns to which the offset is added.

    Returns:
        Indices, in order of the sum of the normalised columns.
    """
    if len(values) < 2:
        return np.arange(len(values))
    if keys is None or offsets is None or not offsets.any():
        keys = None
        offsets = None
        paid = 1
    columns = np.ascontiguousarray(values.T)  # numpy reduces long rows ten times as fast
    low = columns.min(axis=1)
    slack = LABEL_TOLERANCE * np.abs(columns).max(axis=1)
    spread = columns.max(axis=1) - low
    # a column of equal entries decides nothing, unless an offset is added to it
    pays = np.arange(len(spread)) < paid
    varying = np.flatnonzero((spread > slack) | pays)
    points = values[:, varying]
    slack = slack[varying]
    scale = np.maximum(spread[varying], slack)
    scale[scale == 0.0] = 1.0
    total = (points - low[varying]) @ (1.0 / scale)
    order = np.argsort(total, kind="stable")
    rule = _Rule(points, slack, keys, offsets, paid)
    if len(order) > MANY:
        return rule.undominated(order)
    return _undominated(order, rule)


def _undominated(order: Index, rule: "_Rule") -> Index:
    """Return the labels that no other one dominates, in their order.

    The first labels dominate most, so few are left to compare with the next ones.
    """
    kept = [order[:0]]
    left = order
    while len(left):
        block = left[:CHUNK]
        block = block[~rule.dominated(block, block, earlier=True)]
        kept.append(block)
        later = left[CHUNK:]
        left = later[~rule.dominated(block, later)]
    return np.concatenate(kept)


@dataclass(frozen=True)
class _Rule:
    """When one label dominates another; fields as the arguments of `pareto`."""

    points: Array
    slack: Array
    keys: Index | None
    offsets: Array | None
    paid: int

    def undominated(self, order: Index) -> Index:
        """Return `_undominated` of many labels by compiled code, which takes half a second to load."""
        kernel = import_module("darts_parallel.exact._label_kernel")
        points = np.ascontiguousarray(self.points[order])
        states = np.zeros_like(order) if self.keys is None else self.keys[order]
        offsets = np.zeros((1, 1)) if self.offsets is None else self.offsets
        kept = kernel.undominated(points, self.slack, states, offsets, self.paid)
        return np.asarray(order[kept])

    def dominated(self, better: Index, worse: Index, *, earlier: bool = False) -> Bools:
        """Return which of `worse` some of `better` dominates; with `earlier`, one before it in a block."""
        extra: Array | None = None
        if self.keys is not None and self.offsets is not None:
            rows = self.offsets[self.keys[better]]
            extra = rows[:, self.keys[worse]]
        shape = (len(better), len(worse))
        result = EARLIER[: shape[0], : shape[1]].copy() if earlier else np.ones(shape, dtype=bool)
        for column, slack in enumerate(self.slack):
            value = self.points[better, column][:, None]
            if extra is not None and column < self.paid:
                value = value + extra
            result &= value <= self.points[worse, column] + slack
        return np.asarray(result.any(axis=0))


def price_grids(value: Array, memory: Array, limit: int = MAX_PRICES) -> list[Array]:
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
    value = value.reshape(-1, size)
    memory = memory.reshape(-1, size)
    # among the cheapest, the smallest: then walk the lower hull towards less memory
    current = np.lexsort((memory, value), axis=1)[:, 0]
    steps: list[Array] = [np.zeros(len(rows))]
    for _ in range(size):
        saved = memory[rows, current][:, None] - memory
        extra = value - value[rows, current][:, None]
        saves = saved > 0
        saved = np.where(saves, saved, 1.0)
        price = np.where(saves, extra / saved, np.inf)
        best = price.min(axis=1)
        if not np.isfinite(best).any():
            break
        steps.append(best)
        tied = price <= best[:, None] * (1 + GAIN_TOLERANCE)
        smallest = np.where(tied, memory, np.inf).argmin(axis=1)
        current = np.where(np.isfinite(best), smallest, current)
    by_stage = np.stack(steps, axis=-1).reshape(stages, -1)
    thinned = []
    for prices in by_stage:
        found = np.unique(prices[np.isfinite(prices)].clip(min=0.0))
        if len(found) > limit:
            places = np.linspace(0, len(found) - 1, limit)
            quantiles = np.unique(places.round().astype(int))
            found = found[quantiles]
        thinned.append(found)
    return thinned


def price_grid(value: Array, memory: Array, limit: int = MAX_PRICES) -> Array:
    """Return the prices of one stage: `price_grids` of values and bytes `(R, C)`."""
    return price_grids(value[None], memory[None], limit)[0]
