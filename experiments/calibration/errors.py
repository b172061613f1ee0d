"""Error figures of a prediction: percentage errors, bias, quantiles, rank correlation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of N figures; shares, not percent."""

    count: int
    median: float
    """Median of |predicted / measured - 1|."""
    mean: float
    bias: float
    """Median of predicted / measured - 1."""
    p90: float
    """90 % of the figures are no further off."""

    def cells(self) -> list[str]:
        """Write the number of figures, then median, mean, bias and 90 % in percent."""
        if not self.count:
            return ["0", "", "", "", ""]
        shares = (f"{100 * self.median:.1f}", f"{100 * self.mean:.1f}", f"{100 * self.bias:+.1f}")
        return [str(self.count), *shares, f"{100 * self.p90:.1f}"]


def summarise(ratios: Sequence[float]) -> ErrorSummary:
    """Summarize the errors of predictions over measured figures; `nan` where there are none."""
    if not ratios:
        return ErrorSummary(0, *([float("nan")] * 4))
    signed = np.asarray(ratios) - 1.0
    size = np.abs(signed)
    figures = (np.median(size), size.mean(), np.median(signed), np.quantile(size, 0.9))
    return ErrorSummary(len(size), *map(float, figures))


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Correlate ranks; `nan` where either side is constant."""
    from scipy.stats import spearmanr

    if len(set(predicted)) < 2 or len(set(measured)) < 2:
        return float("nan")
    return float(spearmanr(predicted, measured).statistic)
