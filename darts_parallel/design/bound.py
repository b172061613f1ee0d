"""A lower bound of the seconds over all ways to spend a budget, from tangents.

For a fixed plan log T is convex and falls in the log goodness z of every knob, so a tangent at any point
bounds it everywhere: log T(z) >= b_k + A_k z. Over what the budget allows,

    min_z max_k b_k + A_k z   with   sum_i c_i exp(e_i z_i) <= B,   low <= z <= high

has the dual max over weights w (of sum 1) and a price m >= 0 of

    w b + sum_i min over z_i of (w A)_i z_i + m c_i exp(e_i z_i)  -  m B,

which is a bound for *any* w and m; at the best m money goes in the proportion slope over exponent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.design.request import Knob

Array = NDArray[np.float64]
HALVINGS = 60
"""Halvings of the interval of log m."""


@dataclass(frozen=True)
class Prices:
    """Prices of n knobs, each array of shape `(n,)`."""

    price: Array
    """At the reference."""
    exponent: Array
    low: Array
    """Least log goodness."""
    high: Array
    """Largest log goodness."""

    @staticmethod
    def of(knobs: Sequence[Knob]) -> "Prices":
        """Return the prices of knobs."""
        rows = [(knob.price, knob.exponent, knob.low, knob.high) for knob in knobs]
        price, exponent, low, high = np.array(rows, dtype=float).reshape(-1, 4).T
        return Prices(price, exponent, np.log(low), np.log(high))

    def cost(self, z: Array) -> Array:
        """Return what every knob costs at log goodness `z`."""
        return np.asarray(self.price * np.exp(self.exponent * z))

    def spend(self, slopes: Array, money: Array) -> tuple[Array, Array]:
        """Return the least value of `slopes @ z` over what money buys, and where it is.

        Args:
            slopes: `(P, n)`; of log seconds, 0 or below where the knob helps.
            money: `(P,)`.

        Returns:
            Values `(P,)`, infinite where not even the least goodness can be bought; and z `(P, n)`.
        """
        if not len(self.price):
            return np.where(money >= 0.0, 0.0, np.inf), slopes
        worth = np.maximum(-slopes, 0.0) / self.exponent
        least, most = self.cost(self.low), self.cost(self.high)
        floor = 1e-300
        top = np.log(np.maximum((worth / least).max(1), floor)) + 1.0
        bottom = np.log(np.maximum((worth / most).min(1), 1e-18 * np.exp(top))) - 1.0
        for _ in range(HALVINGS):
            middle = (top + bottom) / 2
            spent = np.clip(worth * np.exp(-middle)[:, None], least, most).sum(1)
            over = spent > money
            bottom, top = np.where(over, middle, bottom), np.where(over, top, middle)
        share = np.clip(worth * np.exp(-top)[:, None], least, most)
        z = np.log(share / self.price) / self.exponent
        price = np.where(share.sum(1) >= money * (1 - 1e-9), np.exp(top), 0.0)
        # the Lagrangian at its own minimum bounds from below whatever the price
        best = np.where(price[:, None] > 0.0, z, np.where(worth > 0.0, self.high, self.low))
        value = (slopes * best).sum(1) + price * (self.cost(best).sum(1) - money)
        return np.where(least.sum() <= money, value, np.inf), z


def dual_bound(prices: Prices, heights: Array, slopes: Array, money: float) -> tuple[float, Array]:
    """Return the bound of one plan from all its tangents, and the point at which it is reached.

    Args:
        heights: b, `(K,)`.
        slopes: A, `(K, n)`.
        money: What the knobs may cost.
    """
    rest = np.full(len(heights), money)
    alone = heights + prices.spend(slopes, rest)[0]
    weights = np.eye(len(heights))[int(alone.argmax())]
    value, z = _value(prices, heights, slopes, money, weights)
    if len(heights) == 1 or not np.isfinite(value):
        return value, z
    from scipy.optimize import minimize

    def negative(w: Array) -> tuple[float, Array]:
        whole = max(w.sum(), 1e-12)
        found, point = _value(prices, heights, slopes, money, w / whole)
        along = heights + slopes @ point
        return -found, -(along - along @ w / whole) / whole

    start = (weights + 1.0 / len(weights)) / 2
    result = minimize(
        negative, start, jac=True, method="SLSQP", bounds=[(0.0, 1.0)] * len(start),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": np.ones_like},
        options={"maxiter": 100, "ftol": 1e-9},
    )  # fmt: skip
    better = np.clip(result.x, 0.0, 1.0)
    if np.isfinite(better).all() and better.sum() > 0.0:
        found, point = _value(prices, heights, slopes, money, better / better.sum())
        if found >= value:
            return found, point
    return value, z


def _value(prices: Prices, heights: Array, slopes: Array, money: float, w: Array) -> tuple[float, Array]:
    """Return the dual's value at weights, and the point that minimises its Lagrangian."""
    values, points = prices.spend((w @ slopes)[None], np.array([money]))
    return float(w @ heights + values[0]), points[0]
