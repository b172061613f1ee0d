"""Draw anytime curves: the best plan so far of every method against seconds."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from darts_parallel.report import csv_text
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.runs import MethodRun
from experiments.comparison.standings import best_known

PANELS = 12
"""Problems that are drawn, evenly chosen from all."""
SMALLEST, WORST = 1e-3, 100.0
"""Percent below which the axis is linear, and at which runs without a plan are drawn."""


def curves_figure(runs: Sequence[MethodRun]) -> Figure:
    """Draw one panel a problem: median over seeds of the gap to the best known plan."""
    names = list(dict.fromkeys(run.problem for run in runs))
    names = [names[i] for i in sorted({round(x) for x in np.linspace(0, len(names) - 1, PANELS)})]
    colours = matplotlib.colormaps["tab20"]
    methods = list(dict.fromkeys(run.method for run in runs))
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, name in zip(panels, names, strict=False):
        for number, method in enumerate(methods):
            mine = [run for run in runs if (run.problem, run.method) == (name, method)]
            times, gaps = median_gaps(mine, best_known(runs)[name])
            # one plan at the end is a step without length, and would be invisible
            marker = "s" if len(times) == 1 else None
            panel.step(
                times,
                gaps,
                where="post",
                color=colours(number % 20),
                linewidth=1.0,
                marker=marker,
                markersize=3,
                label=method,
            )
        panel.set_title(name, fontsize=7, loc="left")
        panel.set(xscale="log", ylim=(-0.3 * SMALLEST, 1.5 * WORST))
        panel.set_yscale("symlog", linthresh=SMALLEST)
        # the usual labels between decades overprint one another
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(labelsize=6)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("gap to the best known plan, %", fontsize=8)
    lines: Any = panels[0].get_lines()
    figure.legend(handles=lines, loc="outside upper center", ncols=6, fontsize=7)
    return figure


def curves_csv(runs: Sequence[MethodRun]) -> str:
    """Write all anytime curves as CSV."""
    return csv_text(
        ("problem", "method", "seed", "at_s", "iteration_time_s"),
        ((run.problem, run.method, run.seed, at, cost) for run in runs for at, cost in run.curve),
    )


def median_gaps(runs: Sequence[MethodRun], best: float) -> tuple[list[float], list[float]]:
    """Return the moments at which the median over runs changes, and its gap in percent from then on."""
    curves = [run.curve for run in runs if run.curve]
    if not curves:
        return [], []
    times = sorted({at for curve in curves for at, _ in curve} | {max(run.seconds for run in runs)})
    medians = [quantile([read_curve(curve, at) for curve in curves], 50) for at in times]
    return times, [min(max(100.0 * (value / best - 1.0), 0.0), WORST) for value in medians]
