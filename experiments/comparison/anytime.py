"""Anytime curves of a comparison: the best hard plan so far against wall-clock."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baselines import PLANNERS
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text
from experiments.comparison.panels import finish_figure, finish_panel, small_panels
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.runs import ORACLE, SEARCH, Run
from experiments.comparison.standings import best_known

COLOURS = {SEARCH: "#4878a8", "random_search": "#8a8a8a", "annealing": "#e1973c", "flexflow": "#6a9f58",
           "evolution": "#b279a2", ORACLE: "#000000"}  # fmt: skip
PANELS = 12
"""Problems that are drawn, evenly chosen from all."""
SMALLEST = 1e-3
"""Percent; the axis is linear below this."""
WORST = 100.0
"""Percent; where runs without a plan, and worse ones, are drawn."""


def write_curves(path: Path, runs: Sequence[Run]) -> None:
    """Every improvement of every run: `problem, method, seed, at_s, iteration_time_s`."""
    header = ("problem", "method", "seed", "at_s", "iteration_time_s")
    rows = ((run.problem, run.method, run.seed, at, cost) for run in runs for at, cost in run.curve)
    write_text(path, csv_text(header, rows))


def anytime_figure(runs: Sequence[Run]) -> Figure:
    """One panel a problem: median over seeds of the gap to the best known plan; dots: planners that end."""
    names = list(dict.fromkeys(run.problem for run in runs))
    names = [names[i] for i in sorted({round(x) for x in np.linspace(0, len(names) - 1, PANELS)})]
    best = best_known(runs)
    figure, axes = small_panels(len(names), height=2.6)
    for panel, name in zip(axes, names, strict=False):
        mine = [run for run in runs if run.problem == name]
        for method in COLOURS:
            _draw(panel, [run for run in mine if run.method == method], best[name], method)
        others = [run for run in mine if run.method in PLANNERS and not PLANNERS[run.method].seeded]
        for run in others:
            gap = min(100.0 * (run.iteration_time_s / best[name] - 1.0), WORST)
            panel.plot(run.seconds, max(gap, 0.0), ".", color="#c44e52", markersize=5)
            panel.annotate(run.method, (run.seconds, max(gap, 0.0)), fontsize=5, color="#c44e52")
        panel.set_xscale("log")
        panel.set_yscale("symlog", linthresh=SMALLEST)
        panel.set_ylim(-0.3 * SMALLEST, 1.5 * WORST)
        finish_panel(panel, name)
    finish_figure(figure, axes, "the best known plan", columns=6)
    return figure


def _draw(panel: Axes, runs: Sequence[Run], best: float, method: str) -> None:
    """The median curve of a method's seeds."""
    curves = [run.curve for run in runs if run.curve]
    if not curves:
        return
    times = sorted({at for curve in curves for at, _ in curve} | {max(run.seconds for run in runs)})
    medians = [quantile([read_curve(curve, at) for curve in curves], 50) for at in times]
    gaps = [min(max(100.0 * (value / best - 1.0), 0.0), WORST) for value in medians]
    marker = "s" if len(times) == 1 else None  # one plan at the end: a step without length is invisible
    panel.step(
        times,
        gaps,
        where="post",
        color=COLOURS[method],
        linewidth=1.0,
        label=method,
        marker=marker,
        markersize=3,
    )
