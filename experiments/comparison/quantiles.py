"""Observed quantiles and anytime curves, for tables that must not average failures away."""

import math
from collections.abc import Sequence

EXACT = 1e-9
"""Relative; a gap below this is rounding."""


def quantile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed.

    Never between two values, so that a failure (an infinite gap) cannot be averaged away.

    Args:
        values: At least one.
        percent: Above 0, at most 100.
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered) - EXACT), 1) - 1]


def read_curve(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """Best iteration time that an anytime curve had reached after `seconds`; infinite before any plan."""
    reached = [cost for at, cost in curve if at <= seconds]
    return reached[-1] if reached else float("inf")
