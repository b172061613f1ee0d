"""Draw anytime curves: the best plan so far of every method against seconds."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from darts_parallel.report import csv_text
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.runs import MethodRun, best_known, grouped

PANELS = 12
"""Problems that are drawn, evenly chosen from all."""
SMALLEST = 1e-3
"""Percent below which the axis is linear."""
WORST = 100.0
"""Percent at which runs without a plan are drawn."""


def curves_figure(runs: Sequence[MethodRun]) -> Figure:
    """Draw one panel a problem: median over seeds of the gap to the best known plan."""
    problems = grouped(runs, "problem")
    places = {round(place) for place in np.linspace(0, len(problems) - 1, PANELS)}
    shown = [name for place, name in enumerate(problems) if place in places]
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    methods = list(grouped(runs, "method"))
    for panel, name in zip(panels, shown, strict=False):
        panel.set_title(name, fontsize=7, loc="left")
        _draw_panel(panel, problems[name], methods)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    figure.supxlabel("seconds", fontsize=8)
    figure.supylabel("gap to the best known plan, %", fontsize=8)
    lines: Any = panels[0].get_lines()
    figure.legend(handles=lines, loc="outside upper center", ncols=6, fontsize=7)
    return figure


def _draw_panel(panel: Any, runs: Sequence[MethodRun], methods: Sequence[str]) -> None:
    """Draw the curves of one problem; a method has one colour in all panels."""
    (best,) = best_known(runs).values()
    found = grouped(runs, "method")
    colours = matplotlib.colormaps["tab20"]
    for number, method in enumerate(methods):
        times, gaps = median_gaps(found.get(method, []), best)
        style = {"color": colours(number % 20), "linewidth": 1.0, "label": method}
        # one plan at the end is a step without length, and would be invisible
        marker = "s" if len(times) == 1 else None
        panel.step(times, gaps, where="post", marker=marker, markersize=3, **style)
    panel.set(xscale="log", ylim=(-0.3 * SMALLEST, 1.5 * WORST))
    panel.set_yscale("symlog", linthresh=SMALLEST)
    # the usual labels between decades overprint one another
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(labelsize=6)


def curves_csv(runs: Sequence[MethodRun]) -> str:
    """Write all anytime curves as CSV."""
    header = ("problem", "method", "seed", "at_s", "iteration_time_s")
    rows = [(run.problem, run.method, run.seed, *point) for run in runs for point in run.curve]
    return csv_text(header, rows)


def median_gaps(runs: Sequence[MethodRun], best: float) -> tuple[list[float], list[float]]:
    """Return the moments at which the median over runs changes, and its gap in percent from then on."""
    curves = [run.curve for run in runs if run.curve]
    if not curves:
        return [], []
    moments = {at for curve in curves for at, _ in curve}
    times = sorted(moments | {max(run.seconds for run in runs)})
    gaps = []
    for at in times:
        median = quantile([read_curve(curve, at) for curve in curves], 50)
        gaps.append(min(max(100.0 * (median / best - 1.0), 0.0), WORST))
    return times, gaps
