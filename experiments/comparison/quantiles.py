"""Compute observed quantiles, for tables that must not average failures away."""

import math
from collections.abc import Sequence

EXACT = 1e-9
"""Relative; a gap below this is rounding."""


def quantile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed.

    Never between two values, so that a failure (an infinite gap) cannot be averaged away.

    Args:
        values: At least one.
        percent: Above 0, at most 100.
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered) - EXACT), 1) - 1]


def percent(value: float | None) -> str:
    """Return a gap for a table: `0`, within rounding, apart from what merely rounds to it."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "no plan"
    if abs(value) < EXACT:
        return "0"
    if abs(value) < 5e-6:
        return f"{100 * value:.0e} %"
    return f"{100 * value:.3f} %"
