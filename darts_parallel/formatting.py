"""Figures as people read them."""

from math import floor, isfinite, log10


def seconds(value: float) -> str:
    """Seconds with three significant places below one, e.g. `0.112 s`, `12.3 ms`."""
    if value >= 10:
        return f"{value:.2f} s"
    return f"{value:.3f} s" if value >= 0.1 else f"{1e3 * value:.3g} ms"


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, e.g. `12.3 %`."""
    return f"{100 * share:.{digits}f} %"


def number(value: float, scale: float | None = None) -> str:
    """A number with at least four decimals, and four significant digits of `scale` (or of itself)."""
    scale = value if scale is None else scale
    if not isfinite(value):
        return "-"
    return f"{value:.{max(4, 3 - floor(log10(scale))) if scale > 0 else 4}f}"
