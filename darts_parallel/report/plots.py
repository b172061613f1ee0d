"""Pictures of a search for TensorBoard; each function returns a matplotlib figure of its own.

Figures are made without pyplot, so that nothing is registered and nothing has to be closed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
"""Labels of layers up to which every layer has its name."""
MOST_LINES = len(COLOURS)
PANEL_INCHES = 2.9
"""Height of a panel."""


@dataclass(frozen=True)
class Curve:
    """One line of a panel."""

    name: str
    colour: Any
    steps: Sequence[float]
    values: Sequence[float]


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
    names = short_names(layer_names)
    first = search.winner.steps[0]
    height = min(max(3.2, 1.4 + 0.13 * len(names)), 9.0)
    figure = Figure(figsize=(11.0, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    gap = (search.end - first) / 60
    end = search.end + 3 * gap
    bottom = len(names) - 0.5
    _show(axes, search.pixels, (first, search.end, bottom, -0.5))
    _show(axes, search.plan, (search.end + gap, end, bottom, -0.5))
    axes.set_xlim(first, end)
    for edge in plan.boundaries[1:-1]:
        axes.axhline(edge - 0.5, color="black", linewidth=0.5, alpha=0.6)
    rows = thinned(len(names), MOST_ROWS)
    axes.set_yticks(list(rows), [names[row] for row in rows], fontsize=8)
    axes.set(xlabel="step", ylabel="layer")
    axes.text(search.end + 2 * gap, -0.6, "plan", ha="center", va="bottom", fontsize=8)
    _mark_hardening(axes, search.hardened)
    where = f"winning restart, {search.winner.name}; lines: stages of the plan"
    title = f"Most likely strategy of every layer (pale: undecided)\n{where}"
    axes.set_title(title, loc="left", fontsize=10)
    legend = [Patch(color=colour, label=name) for name, colour in search.legend()]
    axes.legend(
        handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8
    )
    return figure


def _show(axes: Axes, pixels: Pixels, extent: tuple[float, float, float, float]) -> None:
    """Show pixels in a rectangle: left, right, bottom, top."""
    axes.imshow(pixels, aspect="auto", interpolation="nearest", extent=extent)


def _mark_hardening(axes: Axes, step: int | None) -> None:
    """Mark the step from which on stage boundaries are whole layers: the seconds may rise there."""
    if step is None:
        return
    axes.axvline(step, color="black", linestyle="--", linewidth=0.9)
    place = axes.get_xaxis_transform()
    style: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7}
    axes.text(step, 0.98, "edges harden", transform=place, **style)


def curves_figure(
    history: Sequence[StepRecord],
    search: Journey | None,
    shares: Pixels | None,
    final: Sequence[float],
) -> Figure:
    """Plot seconds, their causes, pipeline configurations, strategies and memory over the steps.

    Args:
        search: The winning restart; may be missing.
        shares: Its memory over capacity, `(S, pp)`; may be missing.
    """
    panels = dict(_panels(history, search, shares))
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(14.0, PANEL_INCHES * rows), dpi=110)
    bottom = 0.5 / PANEL_INCHES / rows
    top = 1 - 0.3 / PANEL_INCHES / rows
    figure.subplots_adjust(0.04, bottom, 0.83, top, wspace=0.5, hspace=0.3)
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, (title, lines) in zip(places, panels.items(), strict=False):
        for line in lines:
            axes.plot(line.steps, line.values, color=line.colour, linewidth=1.4, label=line.name)
        _mark_hardening(axes, hardened_at(history))
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=7)
        if title == MEMORY and len(final) == len(lines):
            ends = [line.steps[-1] for line in lines]
            colours = [line.colour for line in lines]
            axes.scatter(ends, final, color=colours, marker="D", s=16, zorder=3)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.text(0.98, 0.01, READING, ha="right", va="bottom", fontsize=8)
    return figure


MEMORY = "memory over capacity, by stage (points: the plan)"
READING = """The plan is the best rounded one of the search, not the one of the last step. The surrogate can
rise late in the search: probabilities become 0 or 1, and stage boundaries become whole layers
(dashed line). Its seconds are those of the leading pipeline configuration, which can change."""


def _panels(
    history: Sequence[StepRecord], search: Journey | None, shares: Pixels | None
) -> Iterator[tuple[str, list[Curve]]]:
    """Yield the titles and lines of all panels."""
    steps = [record.step for record in history]
    surrogate = [record.surrogate_time_s for record in history]
    best = [record.best_time_s for record in history]
    lines = [Curve("surrogate of the leading plan", COLOURS[1], steps, surrogate)]
    lines.append(Curve("best rounded plan so far", COLOURS[0], steps, best))
    yield "seconds per iteration", lines
    causes = _by_name([record.terms for record in history])
    if causes:
        seconds = {term_words(name): values for name, values in causes.items()}
        yield "surrogate's seconds by cause", _strongest(steps, seconds)
    weights = _by_name([record.outer_weights for record in history])
    yield "weight of pipeline configurations", _strongest(steps, weights)
    if search is None:
        return
    yield "strategies, mean over layers", _strategies(search)
    if shares is not None:
        yield MEMORY, _memory_lines(search.winner.steps, shares)


def _by_name(records: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the values of every name over the steps; 0 where a step lacks it."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name, 0.0) for record in records] for name in names}


def _strategies(search: Journey) -> list[Curve]:
    """Return the mean probability over layers of every strategy with a colour of its own."""
    mean = search.winner.probabilities.mean(1)
    choices = search.winner.choices
    lines = []
    for name, colour in search.colours.items():
        if colour != OTHERS and name in choices:
            values = mean[:, choices.index(name)].tolist()
            lines.append(Curve(name, colour, search.winner.steps, values))
    return lines


def _memory_lines(steps: Sequence[float], shares: Pixels) -> list[Curve]:
    """Return memory over capacity of every stage; at most twelve have a name."""
    count = shares.shape[1]
    shades = colormaps["viridis"](np.linspace(0.0, 0.95, count))
    named = thinned(count, 12)
    lines = []
    for stage in range(count):
        name = f"stage {stage}" if stage in named else ""
        lines.append(Curve(name, shades[stage], steps, shares[:, stage].tolist()))
    return lines


def _strongest(steps: Sequence[float], values: dict[str, list[float]]) -> list[Curve]:
    """Return the lines that reach the highest values, each in its colour."""
    order = sorted(values, key=lambda name: -max(values[name]))[:MOST_LINES]
    shown = enumerate(order)
    return [Curve(name, COLOURS[place], steps, values[name]) for place, name in shown]


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
    _spread_ticks(axes, values)
    axes.set_title(f"Sweep over {key}", loc="left")
    figure.savefig(path)


def _spread_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Switch to a logarithmic axis where the values span more than a decade."""
    low = min(values)
    if low > 0 and max(values) / low >= 16:
        axes.set_xscale("log")
        shown = [values[place] for place in thinned(len(values), 12)]
        axes.set_xticks(shown, [f"{value:g}" for value in shown])
        axes.set_xticks([], minor=True)
