"""Anytime curves where the schedule is free: the best plan so far of every method against seconds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.comparison.panels import finish_figure, finish_panel, small_panels
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.schedule_suite import METHODS, SEARCH, Solved

COLOURS = dict(zip(METHODS, ("#4878a8", "#000000", "#c44e52", "#937860", "#8c8c00", "#d62790", "#8a8a8a",
                             "#e1973c", "#6a9f58", "#b279a2"), strict=True))  # fmt: skip
WORST = 40.0
"""Percent; worse plans, and none, are drawn here."""


def curves_figure(solved: Sequence[Solved], budget: float) -> Figure:
    """One panel a problem: median over seeds of the gap to the best plan of all methods.

    Args:
        solved: All answers.
        budget: Seconds of every run.
    """
    figure, panels = small_panels(len(solved), height=2.5)
    for panel, entry in zip(panels, solved, strict=False):
        for method in METHODS:
            _draw(panel, entry, method, budget)
        panel.set_ylim(-0.5, WORST)
        panel.set_yscale("symlog", linthresh=1.0)
        finish_panel(panel, entry.case.name)
    finish_figure(figure, panels, "the best plan of all methods", columns=5)
    return figure


def _draw(panel: Axes, entry: Solved, method: str, budget: float) -> None:
    curves = [answer.curve for answer in entry.answers if answer.method == method]
    if not curves:
        return
    times = np.linspace(0.0, budget, 81)
    medians = [quantile([read_curve(curve, at) for curve in curves], 50) for at in times.tolist()]
    gaps = [min(100.0 * (value / entry.best - 1.0), WORST) for value in medians]
    width = 2.0 if method == SEARCH else 0.9
    panel.step(times, gaps, where="post", color=COLOURS[method], linewidth=width, label=method)
