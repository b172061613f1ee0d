"""A lower bound of the seconds over all ways to spend a budget, from slopes at points.

For a fixed plan the seconds are sums, maxima and norms of work over rates and of latencies: convex
in the inverse goodness y = exp(-z) of the knobs. Slopes at a point z0 therefore bound them
everywhere,

    T(z) >= T(z0) (1 - sum_i w_i + sum_i w_i exp(z0_i - z_i)),   w_i = -d log T / d z_i at z0,

with equality where no maximum changes sides. The log of this is convex in z, so its tangent at any
other point bounds log T(z) >= b + A z, too. Over what the budget allows,

    min_z b + A z   with   sum_i c_i exp(e_i z_i) <= B,   low <= z <= high

has the dual max over a price m >= 0 of

    b + sum_i min over z_i of A_i z_i + m c_i exp(e_i z_i)  -  m B,

which is a bound for *any* m; at the best m money goes in the proportion slope over exponent.
Tangents move to where the bound is lowest until it hardly rises. Mixtures of several points' lines
bound no better (`docs/what-did-not-help.md`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from darts_parallel.cost import Array, Bools

ROUNDS = 6
"""Points at most to which tangents move."""
BELOW = 1.0 - 1e-12
"""Factor of money that is spent, so that rounding never spends more than there is."""
ALL_SPENT = 1.0 - 1e-9
"""Share of the money from which it limits the knobs, below rounding."""
TINY = 1e-300
"""Keeps quotients finite."""


class Spent(NamedTuple):
    """Where a bound is lowest."""

    value: Array
    """Shape `(P,)`."""
    z: Array
    """Log goodness there, `(P, n)`."""


class Lines(NamedTuple):
    """Lines `heights + slopes @ z` below log seconds, shapes `(...)` and `(..., n)`."""

    heights: Array
    slopes: Array


class Bound(NamedTuple):
    """A lower bound of log seconds, and the log goodness `(n,)` that minimises its Lagrangian."""

    value: float
    z: Array


@dataclass(frozen=True)
class Knobs:
    """Figures that money changes, n of them: `price * goodness ** exponent`, arrays of shape `(n,)`.

    The goodness is the factor over the reference (SI units), or its inverse where less of the
    figure is better; its logarithm lies from `low` to `high`. The price is that of the whole
    cluster at the reference.
    """

    names: tuple[str, ...]
    price: Array
    exponent: Array
    low: Array
    high: Array
    reference: Array

    def only(self, kept: Bools) -> "Knobs":
        """Return the knobs at which `kept` is true."""
        _, *values = vars(self).values()
        names = [self.names[index] for index in np.flatnonzero(kept)]
        return Knobs(tuple(names), *(value[kept] for value in values))

    def __len__(self) -> int:
        return len(self.names)

    def cost(self, z: Array) -> Array:
        """Return the cost of every knob at log goodness `z`."""
        return self.price * np.exp(self.exponent * z)

    def spend(self, slopes: Array, money: Array) -> Spent:
        """Return the least values of `slopes @ z` over what money `(P,)` buys, and their z.

        Slopes `(P, n)` of log seconds are 0 or below where a knob helps; a value is infinite where
        not even the least goodness can be bought.
        """
        if not self.names:
            return Spent(np.where(money >= 0.0, 0.0, np.inf), slopes)
        least = self.cost(self.low)
        most = self.cost(self.high)
        worth = np.maximum(-slopes, 0.0) / self.exponent
        rate = _rate(worth, least, most, money * BELOW)
        wanted = worth * rate[:, None]
        share = np.clip(wanted, least, most)
        z = np.log(share / self.price) / self.exponent
        limited = share.sum(1) >= money * ALL_SPENT
        worth_of_money = 1.0 / np.maximum(rate, TINY)
        price = np.where(limited, worth_of_money, 0.0)
        # the Lagrangian at its own minimum bounds from below whatever the price
        unlimited = np.where(worth > 0.0, self.high, self.low)
        priced = price[:, None] > 0.0
        best = np.where(priced, z, unlimited)
        excess = self.cost(best).sum(1) - money
        value = (slopes * best).sum(1) + price * excess
        paid = least.sum() <= money
        return Spent(np.where(paid, value, np.inf), z)


def _rate(
    worth: Array,
    least: Array,
    most: Array,
    money: Array,
) -> Array:
    """Return the largest t at which `clip(worth * t, least, most)` sums to no more than the money, `(P,)`.

    The sum is linear between the 2n values of t at which a knob leaves its least or reaches its
    most.
    """
    leaves = _quotient(least, worth)
    reaches = _quotient(most, worth)
    turns = np.hstack([leaves, reaches])
    turns.sort(axis=1)
    rows = np.arange(len(worth))

    def spent(t: Array) -> Array:
        wanted = worth * t[:, None]
        shares = np.clip(wanted, least, most)
        return shares.sum(1)

    first = np.zeros(len(worth), dtype=np.int64)
    after = np.full(len(worth), turns.shape[1])
    for _ in range(turns.shape[1].bit_length()):
        middle = (first + after) // 2
        paid = spent(turns[rows, middle]) <= money
        first = np.where(paid, middle, first)
        after = np.where(paid, after, middle)
    begin = turns[rows, first]
    at = begin[:, None]
    moving = (leaves <= at) & (at < reaches)
    slope = np.where(moving, worth, 0.0).sum(1)
    more = _quotient(money - spent(begin), slope)
    return begin + np.maximum(more, 0.0)


def _quotient(above: Array, below: Array) -> Array:
    """Return quotients; 0 where the divisor is not above 0."""
    result = np.zeros(below.shape)
    np.divide(above, below, out=result, where=below > 0.0)
    return result


def log_tangents(
    heights: Array,
    slopes: Array,
    points: Array,
    at: Array,
) -> Lines:
    """Return lines below log T(z): the tangents at `at` of the bounds of points.

    At the points `(..., n)` log seconds have these heights `(...)` and slopes `(..., n)`.
    """
    parts = -slopes * np.exp(points - at)
    fixed = np.maximum(1.0 + slopes.sum(-1), 0.0)
    total = fixed + parts.sum(-1)
    tangents = -parts / total[..., None]
    at_zero = heights + np.log(total) - (tangents * at).sum(-1)
    return Lines(at_zero, tangents)
