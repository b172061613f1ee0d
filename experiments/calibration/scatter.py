"""The picture of a validation: predicted against measured, by source."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.calibration.outcome import Outcome
from experiments.calibration.ranking import JobRanking
from experiments.calibration.tables import OVERALL, by_file, pairs

MARKERS = "os^vDP*X<>"


def scatter_figure(outcomes: Sequence[Outcome]) -> Figure:
    """Left: seconds per iteration. Right: memory. The band is 10 % either way."""
    figure = Figure(figsize=(12.0, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, outcomes, "seconds", 1.0, "seconds per iteration")
    _draw(right, outcomes, "memory", 2.0**-30, "memory of the fullest device, GiB")
    left.legend(fontsize=7, frameon=False, loc="upper left")
    return figure


def _draw(axes: Axes, outcomes: Sequence[Outcome], what: str, scale: float, label: str) -> None:
    everything: list[float] = []
    for index, (name, members) in enumerate(by_file(outcomes).items()):
        predicted, measured = (scale * np.asarray(values) for values in pairs(members, what))
        if name == OVERALL or not len(predicted):
            continue
        marker = MARKERS[index % len(MARKERS)]
        colour = f"C{index % 10}"
        axes.scatter(measured, predicted, s=14, alpha=0.7, marker=marker, color=colour, label=name)
        everything += [*predicted, *measured]
    axes.set_xlabel(f"measured {label}")
    axes.set_ylabel(f"predicted {label}")
    if everything:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ends = np.array([min(everything) / 1.3, max(everything) * 1.3])
        axes.plot(ends, ends, color="black", linewidth=0.7)
        axes.fill_between(ends, ends / 1.1, ends * 1.1, color="#dddddd", linewidth=0.0, zorder=0)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
    axes.grid(color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)


def ranking_figure(jobs: Sequence[JobRanking]) -> Figure:
    """Regret of the first choice by job: the model's, that of the smallest tp x pp, chance."""
    figure = Figure(figsize=(9.0, 1.2 + 0.26 * max(len(jobs), 1)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(jobs))
    for offset, (label, colour, values) in enumerate((
        ("model", "C0", [job.regret["", 1] for job in jobs]),
        ("model, best of three", "C9", [job.regret["", 3] for job in jobs]),
        ("smallest tp x pp", "C1", [job.regret["smallest", 1] for job in jobs]),
        ("chance", "C7", [job.random[1] for job in jobs]),
    )):  # fmt: skip
        shares = 100 * np.asarray(values)
        axes.barh(places + 0.2 * (offset - 1.5), shares, height=0.2, color=colour, label=label)
    axes.set_yticks(places, [job.name[:70] for job in jobs], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("slower than the fastest measured plan, %")
    if jobs:
        axes.legend(fontsize=7, frameon=False, loc="lower right")
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure
