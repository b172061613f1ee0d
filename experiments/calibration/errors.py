"""Error figures of a prediction: percentage errors, bias, quantiles, rank correlation."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from experiments.calibration.rules import Run

SMALLEST_GROUP = 4
"""Runs that a rank correlation needs to say anything."""


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of N figures; shares, not percent."""

    count: int
    median: float
    """Of |predicted / measured - 1|."""
    mean: float
    bias: float
    """Median of predicted / measured - 1."""
    p90: float
    """90 % of the figures are no further off."""

    def cells(self) -> list[str]:
        """Number of figures, then median, mean, bias and 90 % in percent."""
        shares = (f"{100 * self.median:.1f}", f"{100 * self.mean:.1f}", f"{100 * self.bias:+.1f}")
        return [str(self.count), *shares, f"{100 * self.p90:.1f}"]


def summarise(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Errors of predictions; `nan` everywhere where there are none."""
    if not predicted:
        return ErrorSummary(0, *([float("nan")] * 4))
    signed = np.asarray(predicted) / np.asarray(measured) - 1.0
    size = np.abs(signed)
    return ErrorSummary(
        len(size), float(np.median(size)), float(size.mean()), float(np.median(signed)),
        float(np.quantile(size, 0.9)),
    )  # fmt: skip


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Ranks from 0, equal values share their mean rank."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(1)
    equal = (array[None, :] == array[:, None]).sum(1)
    return np.asarray(below + (equal - 1) / 2.0, dtype=np.float64)


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Rank correlation, `nan` where either side is constant."""
    a, b = (ranks(values) - (len(values) - 1) / 2.0 for values in (predicted, measured))
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else float("nan")


def strategy_group(run: Run) -> tuple[object, ...]:
    """What runs have in common that differ only in their strategy: model, job, machine, source.

    Global batches within some 10 % are one job (not every dp divides the same batch); such runs are
    compared by their seconds per sequence.
    """
    return (
        run.row.file, run.row.text("source").split("@")[0], run.layers, run.hidden, run.heads, run.vocab,
        run.seq_len, run.row.text("gpu").lower(), run.gpus, round(4 * log2(run.global_batch)),
        run.row.text("precision").lower(), run.stack.name,
    )  # fmt: skip
