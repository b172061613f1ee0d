"""Error figures of a prediction: percentage errors, bias, quantiles, rank correlation."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from experiments.calibration.hardware import networks_of
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
        run.seq_len, networks_of(run.row, run.gpus_per_node), run.gpus, round(4 * log2(run.global_batch)),
        run.precision, run.stack.name,
    )  # fmt: skip


@dataclass(frozen=True)
class GroupRanking:
    """How well runs of one job are ordered."""

    name: str
    count: int
    correlation: float
    best_rank: int
    """Place, from 1, that the model gives the run measured as fastest."""


def rankings(runs: Sequence[Run], predicted: Sequence[float]) -> list[GroupRanking]:
    """Ranking within every group of at least `SMALLEST_GROUP` runs that vary only the strategy.

    Args:
        predicted: Seconds per iteration, one for each run; runs without measured seconds are left out.
    """
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    names: dict[tuple[object, ...], str] = {}
    for run, seconds in zip(runs, predicted, strict=True):
        if run.iteration_s is not None:
            key = strategy_group(run)
            groups[key].append((seconds / run.global_batch, run.iteration_s / run.global_batch))
            model = run.row.text("model")
            names[key] = f"{model}, {run.hidden} x {run.layers}, {run.heads} heads, {run.gpus} GPUs"
    return [_ranking(names[key], pairs) for key, pairs in groups.items() if len(pairs) >= SMALLEST_GROUP]


def _ranking(name: str, pairs: list[tuple[float, float]]) -> GroupRanking:
    guesses, truth = [p for p, _ in pairs], [m for _, m in pairs]
    best = int(np.argmin(truth))
    place = 1 + sum(guess < guesses[best] for guess in guesses)
    return GroupRanking(name, len(pairs), spearman(guesses, truth), place)
