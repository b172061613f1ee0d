"""The whole search in one picture: which strategy leads in every layer at every step, and how clearly."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from darts_parallel.gradient import WinnerHistory
from darts_parallel.plan import Plan
from darts_parallel.report.plots import figure_with_axes, short_names, thin_labels

COLOURS = ("#4878a8", "#e1973c", "#6a9a58", "#c23b3b", "#8465a8", "#7a5544", "#d27ab0", "#b0a83c", "#3ca3b0")
OTHERS = "#777777"
"""Strategies that lead less often than those with a colour of their own."""
MOST_ROWS = 42


def journey_figure(winner: WinnerHistory, plan: Plan, layer_names: Sequence[str]) -> Figure:
    """Plot layers by steps: the colour is the leading strategy, the opacity its probability.

    Args:
        winner: History of the restart that won.
        plan: The final plan, whose stages are divided by lines.
        layer_names: Of the model.
    """
    probability, leader = winner.probabilities.max(-1)
    colours, legend = _colours(winner, leader.numpy())
    weight = probability.numpy()[..., None]
    picture = (weight * colours[leader.numpy()] + (1.0 - weight)).transpose(1, 0, 2)
    names = short_names(layer_names)
    height = min(max(3.2, 1.4 + 0.13 * len(names)), 9.0)
    figure, axes = figure_with_axes(11.0, height, left=1.3, right=2.6, top=0.65)
    last = winner.steps[-1] + (winner.steps[-1] - winner.steps[-2] if len(winner.steps) > 1 else 1)
    axes.imshow(picture.clip(0.0, 1.0), aspect="auto", interpolation="nearest",
                extent=(winner.steps[0], last, len(names) - 0.5, -0.5))  # fmt: skip
    for first in plan.boundaries[1:-1]:
        axes.axhline(first - 0.5, color="black", linewidth=0.5, alpha=0.6)
    thin_labels(axes, "y", names, MOST_ROWS)
    axes.set_xlabel("step")
    axes.set_ylabel("layer")
    where = f"winning restart, {winner.name}; lines: stages of the plan"
    title = f"Leading strategy of every layer; the paler, the less certain\n{where}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    return figure


def _colours(winner: WinnerHistory, leader: NDArray[np.int64]) -> tuple[NDArray[np.float64], list[Patch]]:
    """Return a colour of every strategy `(C, 3)` and the legend: the most frequent leaders get their own."""
    counts = np.bincount(leader.ravel(), minlength=len(winner.choices))
    # what leads at the end comes first, whatever came before
    final = np.bincount(leader[-1], minlength=len(winner.choices)) > 0
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda c: (not final[c], -counts[c], c))
    colours = np.tile(to_rgb(OTHERS), (len(winner.choices), 1))
    legend = []
    for choice, colour in zip(order, COLOURS, strict=False):
        colours[choice] = to_rgb(colour)
        legend.append(Patch(color=colour, label=winner.choices[choice]))
    if len(order) > len(COLOURS):
        legend.append(Patch(color=OTHERS, label=f"{len(order) - len(COLOURS)} others"))
    return colours, legend
