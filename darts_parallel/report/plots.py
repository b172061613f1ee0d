"""Pictures of a search for TensorBoard; each function returns a matplotlib figure of its own.

Figures are made without pyplot, so that nothing is registered and nothing has to be closed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from darts_parallel.gradient import StepRecord
from darts_parallel.plans import Plan
from darts_parallel.report.format import term_words
from darts_parallel.report.journey import (
    COLOURS,
    OTHERS,
    Journey,
    Pixels,
    hardened_at,
    short_names,
    thinned,
)

MOST_ROWS = 42
MOST_LINES = len(COLOURS)
Line = tuple[str, Any, Sequence[float], Sequence[float]]
"""Name, colour, steps and values."""


def to_image(figure: Figure) -> NDArray[np.uint8]:
    """Return pixels of a figure, shape `(height, width, 3)`."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def journey_figure(search: Journey, plan: Plan, layer_names: Sequence[str]) -> Figure:
    """Plot layers by steps: the colour is the leading strategy, the opacity its probability.

    Args:
        plan: The final plan: the last column; its stages are divided by lines.
    """
    names, first = short_names(layer_names), search.winner.steps[0]
    height = min(max(3.2, 1.4 + 0.13 * len(names)), 9.0)
    figure = Figure(figsize=(11.0, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    gap = (search.end - first) / 60
    plan_from, end, bottom = search.end + gap, search.end + 3 * gap, len(names) - 0.5
    for pixels, *span in ((search.pixels, first, search.end), (search.plan, plan_from, end)):
        axes.imshow(pixels, aspect="auto", interpolation="nearest", extent=(*span, bottom, -0.5))
    axes.set_xlim(first, end)
    for edge in plan.boundaries[1:-1]:
        axes.axhline(edge - 0.5, color="black", linewidth=0.5, alpha=0.6)
    rows = thinned(len(names), MOST_ROWS)
    axes.set_yticks(list(rows), [names[row] for row in rows], fontsize=8)
    axes.set(xlabel="step", ylabel="layer")
    axes.text(search.end + 2 * gap, -0.6, "plan", ha="center", va="bottom", fontsize=8)
    _mark_hardening(axes, search.hardened)
    where = f"winning restart, {search.winner.name}; lines: stages of the plan"
    title = f"Leading strategy of every layer; the paler, the less certain\n{where}"
    axes.set_title(title, loc="left", fontsize=10)
    legend = [Patch(color=colour, label=name) for name, colour in search.legend()]
    axes.legend(
        handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8
    )
    return figure


def _mark_hardening(axes: Axes, step: int | None) -> None:
    """Mark the step from which on stage boundaries are whole layers: the seconds may rise there."""
    if step is not None:
        axes.axvline(step, color="black", linestyle="--", linewidth=0.9)
        axes.text(
            step,
            0.98,
            "edges harden",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="top",
            fontsize=7,
        )


def curves_figure(
    history: Sequence[StepRecord],
    search: Journey | None,
    shares: Pixels | None,
    final: Sequence[float],
) -> Figure:
    """Plot the search: seconds, their causes, outer choices, strategies and memory, each line in a colour.

    Args:
        search: The winning restart; may be missing.
        shares: Its memory over capacity, `(S, pp)`; may be missing.
    """
    panels = dict(_panels(history, search, shares))
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(14.0, 2.9 * rows), dpi=110)
    figure.subplots_adjust(
        0.04, 0.5 / 2.9 / rows, 0.83, 1 - 0.3 / 2.9 / rows, wspace=0.5, hspace=0.3
    )
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, (title, lines) in zip(places, panels.items(), strict=False):
        for name, colour, steps, values in lines:
            axes.plot(steps, values, color=colour, linewidth=1.4, label=name)
        _mark_hardening(axes, hardened_at(history))
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=7)
        if title == MEMORY and len(final) == len(lines):
            ends, colours = [line[2][-1] for line in lines], [line[1] for line in lines]
            axes.scatter(ends, final, color=colours, marker="D", s=16, zorder=3)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.text(0.98, 0.01, READING, ha="right", va="bottom", fontsize=8)
    return figure


MEMORY = "memory over capacity, by stage (points: the plan)"
READING = """The plan is the best rounded one that was met, not the last step's. The surrogate may rise:
as temperature falls and sharpness grows, mixtures that no plan is become whole strategies; where another
outer choice leads, its seconds are shown; once edges harden, a layer that moves shifts all its seconds."""


def _panels(
    history: Sequence[StepRecord], search: Journey | None, shares: NDArray[np.float64] | None
) -> Iterator[tuple[str, list[Line]]]:
    """Yield the titles and lines of all panels."""
    steps = [record.step for record in history]
    times = ([r.surrogate_time_s for r in history], [r.best_time_s for r in history])
    names = ("surrogate of the leading plan", "best rounded plan so far")
    colours = (COLOURS[1], COLOURS[0])
    lines: list[Line] = list(zip(names, colours, (steps, steps), times, strict=True))
    yield "seconds per iteration", lines
    causes = list(dict.fromkeys(name for record in history for name in record.terms))
    if causes:
        values = {
            term_words(name): [record.terms.get(name, 0.0) for record in history] for name in causes
        }
        yield "surrogate's seconds by cause", _strongest(steps, values)
    outer = dict.fromkeys(name for record in history for name in record.outer_weights)
    weights = {name: [record.outer_weights.get(name, 0.0) for record in history] for name in outer}
    yield "weight of outer choices", _strongest(steps, weights)
    if search is None:
        return
    mean, own = search.winner.probabilities.mean(1), search.winner.steps
    columns = [
        (name, search.winner.choices.index(name))
        for name, colour in search.colours.items()
        if colour != OTHERS and name in search.winner.choices
    ]
    lines = [
        (name, search.colours[name], own, mean[:, column].tolist()) for name, column in columns
    ]
    yield "strategies, mean over layers", lines
    if shares is not None:
        count = shares.shape[1]
        shades = colormaps["viridis"](np.linspace(0.0, 0.95, count))
        named = {k: f"stage {k}" for k in thinned(count, 12)}
        yield (
            MEMORY,
            [(named.get(k, ""), shades[k], own, shares[:, k].tolist()) for k in range(count)],
        )


def _strongest(steps: Sequence[float], values: dict[str, list[float]]) -> list[Line]:
    """Return the lines that reach the highest values, each in its colour."""
    order = sorted(values, key=lambda name: -max(values[name]))[:MOST_LINES]
    return [(name, COLOURS[i], steps, values[name]) for i, name in enumerate(order)]


def write_sweep_curve(
    path: Path, key: str, points: Sequence[tuple[float, dict[str, float | None]]]
) -> None:
    """Draw seconds per iteration, and the raw gap where there is one, over the values of a key."""
    figure = Figure(figsize=(7.5, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    ordered = sorted(points, key=lambda point: point[0])
    values = [value for value, _ in ordered]
    times = [measured["iteration_time_s"] or float("nan") for _, measured in ordered]
    axes.plot(values, times, color=COLOURS[0], marker="o")
    axes.set_xlabel(key)
    axes.set_ylabel("seconds per iteration", color=COLOURS[0])
    axes.grid(alpha=0.3)
    gaps = [measured["raw_gap"] for _, measured in ordered]
    if any(gap is not None for gap in gaps):
        second = axes.twinx()
        shown = [float("nan") if gap is None else 100.0 * gap for gap in gaps]
        second.plot(values, shown, color=COLOURS[1], marker=".", linestyle="--")
        second.set_ylabel("raw gap, %", color=COLOURS[1])
    low, high = min(values), max(values)
    if low > 0 and high / low >= 16:
        axes.set_xscale("log")
        shown = [values[i] for i in thinned(len(values), 12)]
        axes.set_xticks(shown, [f"{value:g}" for value in shown])
        axes.set_xticks([], minor=True)
    axes.set_title(f"Sweep over {key}", loc="left")
    figure.savefig(path)
