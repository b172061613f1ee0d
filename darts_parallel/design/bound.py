"""A lower bound of the seconds over all ways to spend a budget, from slopes at points.

For a fixed plan the seconds are sums, maxima and norms of work over rates and of latencies: convex in the
inverse goodness y = exp(-z) of the knobs. Slopes at a point z0 therefore bound them everywhere,

    T(z) >= T(z0) (1 - sum_i w_i + sum_i w_i exp(z0_i - z_i)),   w_i = -d log T / d z_i at z0,

with equality where no maximum changes sides. The log of this is convex in z, so its tangent at any other
point bounds log T(z) >= b + A z, too. Over what the budget allows,

    min_z max_k b_k + A_k z   with   sum_i c_i exp(e_i z_i) <= B,   low <= z <= high

has the dual max over weights w (of sum 1) and a price m >= 0 of

    w b + sum_i min over z_i of (w A)_i z_i + m c_i exp(e_i z_i)  -  m B,

which is a bound for *any* w and m; at the best m money goes in the proportion slope over exponent. Tangents
move to where the bound is lowest until it rises no more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROUNDS = 6  # points at most to which tangents move


@dataclass(frozen=True)
class Knobs:
    """Figures that money changes, n of them: `price * goodness ** exponent`, arrays of shape `(n,)`.

    The goodness is the factor over the reference (SI units), or its inverse where less of the figure is
    better; its logarithm lies from `low` to `high`. The price is that of the whole cluster at the reference.
    """

    names: tuple[str, ...]
    price: Array
    exponent: Array
    low: Array
    high: Array
    reference: Array

    def only(self, kept: NDArray[np.bool_]) -> "Knobs":
        """Return the knobs at which `kept` is true."""
        name, *values = vars(self).values()
        names = tuple(own for own, keep in zip(name, kept, strict=True) if keep)
        return Knobs(names, *(value[kept] for value in values))

    def cost(self, z: Array) -> Array:
        """Return what every knob costs at log goodness `z`."""
        return np.asarray(self.price * np.exp(self.exponent * z))

    def spend(self, slopes: Array, money: Array) -> tuple[Array, Array]:
        """Return the least values `(P,)` of `slopes @ z` over what money `(P,)` buys, and their z `(P, n)`.

        Slopes `(P, n)` of log seconds are 0 or below where a knob helps; a value is infinite where not even
        the least goodness can be bought.
        """
        if not self.names:
            return np.where(money >= 0.0, 0.0, np.inf), slopes
        least, most = self.cost(self.low), self.cost(self.high)
        worth = np.maximum(-slopes, 0.0) / self.exponent
        rate = _rate(worth, least, most, money * (1 - 1e-12))  # never above by rounding
        share = np.clip(worth * rate[:, None], least, most)
        z = np.log(share / self.price) / self.exponent
        price = np.where(share.sum(1) >= money * (1 - 1e-9), 1.0 / np.maximum(rate, 1e-300), 0.0)
        # the Lagrangian at its own minimum bounds from below whatever the price
        best = np.where(price[:, None] > 0.0, z, np.where(worth > 0.0, self.high, self.low))
        value = (slopes * best).sum(1) + price * (self.cost(best).sum(1) - money)
        return np.where(least.sum() <= money, value, np.inf), z


def _rate(worth: Array, least: Array, most: Array, money: Array) -> Array:
    """Return the largest t at which `clip(worth * t, least, most)` sums to no more than the money, `(P,)`.

    The sum is linear between the 2n values of t at which a knob leaves its least or reaches its most.
    """
    ends = np.zeros((2, *worth.shape))
    np.divide(np.stack([least, most])[:, None], worth, out=ends, where=worth > 0.0)
    turns = np.sort(np.concatenate(list(ends), axis=1), axis=1)
    first, after = np.zeros(len(worth), dtype=np.int64), np.full(len(worth), turns.shape[1])

    def spent(t: Array) -> Array:
        return np.asarray(np.clip(worth * t[:, None], least, most).sum(1))

    for _ in range(turns.shape[1].bit_length()):
        middle = (first + after) // 2
        paid = spent(np.take_along_axis(turns, middle[:, None], 1)[:, 0]) <= money
        first, after = np.where(paid, middle, first), np.where(paid, after, middle)
    turn = np.take_along_axis(turns, first[:, None], 1)[:, 0]
    slope = np.where((ends[0] <= turn[:, None]) & (turn[:, None] < ends[1]), worth, 0.0).sum(1)
    more = np.divide(money - spent(turn), slope, out=np.zeros_like(slope), where=slope > 0.0)
    return np.asarray(turn + np.maximum(more, 0.0))


def log_tangents(heights: Array, slopes: Array, points: Array, at: Array) -> tuple[Array, Array]:
    """Return b `(...)` and A `(..., n)` of log T(z) >= b + A z, the tangents at `at` of the bounds of points.

    At the points `(..., n)` log seconds have these heights `(...)` and slopes `(..., n)`.
    """
    parts = -slopes * np.exp(points - at)
    total = np.maximum(1.0 + slopes.sum(-1), 0.0) + parts.sum(-1)
    a = -parts / total[..., None]
    return heights + np.log(total) - (a * at).sum(-1), a


def dual_bound(knobs: Knobs, heights: Array, slopes: Array, money: float) -> tuple[float, Array]:
    """Return the largest bound of mixtures of K lines, and the point that minimises its Lagrangian."""

    def value(w: Array) -> tuple[float, Array]:
        (least,), (point,) = knobs.spend((w @ slopes)[None], np.array([money]))
        return float(w @ heights + least), point

    def negative(w: Array) -> tuple[float, Array]:
        whole = max(w.sum(), 1e-12)
        found, point = value(w / whole)
        along = heights + slopes @ point
        return -found, -(along - along @ w / whole) / whole

    first = int((heights + knobs.spend(slopes, np.full(len(heights), money))[0]).argmax())
    weights = np.eye(len(heights))[first]
    single = value(weights)
    along = heights + slopes @ single[1]
    if not np.isfinite(single[0]) or along.max() <= along[first] + 1e-9:
        return single
    from scipy.optimize import minimize

    start = (weights + 1.0 / len(weights)) / 2
    result = minimize(
        negative,
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * len(start),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like},
        options={"maxiter": 100, "ftol": 1e-9},
    )
    better = np.clip(np.nan_to_num(result.x), 0.0, 1.0)
    return max(value(better / max(better.sum(), 1e-12)), single, key=lambda found: found[0])
