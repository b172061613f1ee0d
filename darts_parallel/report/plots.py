"""Pictures of a plan and of its search; each function returns a matplotlib figure of its own.

Figures are made without pyplot, so that nothing is registered and nothing has to be closed. Margins
are given in inches: matplotlib's automatic layouts draw everything twice.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost import CostBreakdown, Event, evaluate
from darts_parallel.errors import DartsParallelError
from darts_parallel.gradient import StepRecord
from darts_parallel.plan import Plan
from darts_parallel.problem import GIB, Problem
from darts_parallel.report.trace import CATEGORIES, Timeline, plan_timeline
from darts_parallel.schedules import SEARCHED

FORWARD, BACKWARD, WEIGHT, TAIL, IDLE = "#4878a8", "#e1973c", "#6a9a58", "#8a8a8a", "#f1f1f1"
PASSES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
FITS, TIGHT, OVER = "#4878a8", "#e1973c", "#c23b3b"
SCHEDULE_WORDS = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved 1F1B",
                  "zero_bubble_h1": "Zero-bubble (ZB-H1)", "zero_bubble_v": "Zero-bubble (ZB-V)",
                  "v_half": "V-half", "v_min": "V-min", "dualpipe": "DualPipe (V)",
                  "searched": "Searched"}  # fmt: skip
MAX_LABELS = 32
MAX_ROW_LABELS = 42
BOTTOM_NAMES = 0.9
"""Inches below an axis of layer names."""
NEGLIGIBLE = 0.01
"""Strategies below this probability in every layer are left out of a heatmap."""


def to_image(figure: Figure) -> NDArray[np.uint8]:
    """Return pixels of a figure, shape `(height, width, 3)`."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def gantt_figure(plan: Plan, cost: CostBreakdown, problem: Problem) -> Figure:
    """Plot the schedule of one iteration; below a searched order that of the closest rule."""
    drawn = [(plan, cost)]
    if plan.schedule_name == SEARCHED:
        with suppress(DartsParallelError):
            usual = replace(plan, schedule=None)
            drawn.append((usual, evaluate(usual, problem)))
    height = 1.3 + 0.26 * max(plan.pp, 4)
    count, base = len(drawn), 0.55 + height * (len(drawn) - 1)
    figure, axes = figure_with_axes(11.0, height * count, top=0.65, bottom=base)
    x, y, width, tall = axes.get_position().bounds
    below = [figure.add_axes((x, y - place / count, width, tall)) for place in range(1, count)]
    unit = (1e-3, "ms") if cost.iteration_time_s < 1 else (1.0, "s")
    for place, own in zip([axes, *below], drawn, strict=True):
        _draw_schedule(place, *own, problem, unit)
    limit = max(place.get_xlim()[1] for place in figure.axes)
    for place in figure.axes if below else []:
        place.set_xlim(0, limit)
    return figure


def _draw_schedule(
    axes: Axes, plan: Plan, cost: CostBreakdown, problem: Problem, named_unit: tuple[float, str]
) -> None:
    """Draw one iteration; its first `2 * pp` micro-batches where there are many more."""
    pp, count = plan.pp, plan.num_micro_batches
    line = plan_timeline(plan, problem)
    shown = 2 * pp if count > 3 * pp else count
    if shown < count:
        width = max(e.end for e in line.events if e.device == 0 and e.operation.micro_batch < shown)
    else:
        width = max(end + sync for end, sync in zip(line.pipeline_ends_s, line.sync_s, strict=True))
    unit, name = named_unit
    axes.set_facecolor(IDLE)
    drawn = [e for e in line.events if e.start < width]
    _draw_passes(axes, drawn, shown * pp <= 300, unit, width, pp)
    _draw_path(axes, [e for e in drawn if e.operation in line.critical], unit)
    kinds = sorted({e.operation.kind for e in line.events}, key=list(PASSES).index)
    patches = [Patch(color=PASSES[kind], label=CATEGORIES[kind]) for kind in kinds]
    patches.append(Patch(color=IDLE, label="idle"))
    patches.append(Patch(facecolor="none", edgecolor="black", label="longest path"))
    if shown == count and max(line.sync_s) > 0.002 * width:
        for device, (end, sync) in enumerate(zip(line.pipeline_ends_s, line.sync_s, strict=True)):
            axes.broken_barh([(end / unit, sync / unit)], (device - 0.45, 0.9), facecolor=TAIL)
        patches.append(Patch(color=TAIL, label="gradient sync and optimizer"))
    axes.set_xlim(0, width / unit)
    axes.set_ylim(pp - 0.5, -0.5)
    thin_labels(axes, "y", [str(stage) for stage in range(pp)], MAX_LABELS)
    part = f", the first {shown} of {count} micro-batches" if shown < count else ""
    words = SCHEDULE_WORDS[line.schedule]
    title = f"{words} schedule of one iteration{part}\n{_pipeline_words(line, cost, count)}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(f"time [{name}]")
    axes.set_ylabel("pipeline stage")
    _legend_above(axes, patches)


def _pipeline_words(line: Timeline, cost: CostBreakdown, count: int) -> str:
    simulated = f"pipeline {max(line.pipeline_ends_s):.4g} s by simulation"
    if line.schedule != "1f1b":
        return simulated
    closed = sum(cost.stage_times_s) + (count - 1) * max(cost.stage_times_s)
    return f"{simulated}, {closed:.4g} s by the closed form"


def _draw_path(axes: Axes, events: Sequence[Event], unit: float) -> None:
    """Draw a line around every pass of the longest path."""
    for device, run in groupby(sorted(events, key=lambda e: e.device), key=lambda e: e.device):
        bars = [(event.start / unit, (event.end - event.start) / unit) for event in run]
        axes.broken_barh(bars, (device - 0.45, 0.9), facecolor="none", edgecolor="black", linewidth=0.8)


def _draw_passes(
    axes: Axes, events: Sequence[Event], numbered: bool, unit: float, width: float, pp: int
) -> None:
    """Draw all passes; those of a device's later chunks are paler."""

    def order(event: Event) -> tuple[int, str, int]:
        return event.device, event.operation.kind, event.operation.stage // pp

    for (device, kind, chunk), run in groupby(sorted(events, key=order), key=order):
        mine = list(run)
        bars = [(event.start / unit, (event.end - event.start) / unit) for event in mine]
        colour = PASSES[kind]
        # a white edge would swallow a very short pass, which would not be drawn at all without one
        wide = max(event.end - event.start for event in mine) > 0.003 * width
        axes.broken_barh(bars, (device - 0.45, 0.9), facecolor=colour, edgecolor="white" if wide else colour,
                         linewidth=0.4, alpha=0.65 ** min(chunk, 3))  # fmt: skip
        for event in mine if numbered else []:
            # a number needs room: about 1 % of the width
            if event.end - event.start > 0.012 * width:
                middle = (event.start + event.end) / (2 * unit)
                axes.text(middle, device, str(event.operation.micro_batch), ha="center", va="center",
                          fontsize=6, color="white", clip_on=True)  # fmt: skip


def memory_figure(cost: CostBreakdown) -> Figure:
    """Plot peak memory of a device of every stage next to its capacity."""
    used = np.array(cost.memory_bytes) / GIB
    capacity = np.array(cost.capacity_bytes) / GIB
    stages = np.arange(len(used))
    shares = used / capacity
    colours = [OVER if share > 1 else TIGHT if share > 0.95 else FITS for share in shares]
    figure, axes = figure_with_axes(min(max(6.5, 1.5 + 0.45 * len(used)), 14.0), 3.6)
    axes.bar(stages, used, color=colours, width=0.75)
    axes.stairs(capacity, np.arange(len(used) + 1) - 0.5, color="black", linewidth=1.5, baseline=None)
    highest = max(float(used.max()), float(capacity.max()))
    labelled = zip(used.tolist(), shares.tolist(), strict=True) if len(used) <= MAX_LABELS else ()
    for stage, (value, share) in enumerate(labelled):
        inside = value > 0.12 * highest
        axes.text(stage, value - 0.015 * highest if inside else value, f"{100 * share:.0f} %",
                  ha="center", va="top" if inside else "bottom", color="white" if inside else "black",
                  fontsize=7)  # fmt: skip
    axes.set_ylim(0, 1.08 * highest)
    axes.set_xlim(-0.6, len(used) - 0.4)
    axes.set_xticks(stages[:: -(-len(used) // MAX_LABELS)])
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("memory of a device [GiB]")
    axes.set_title("Peak memory", loc="left")
    names = {FITS: "fits", TIGHT: "fits, above 95 %", OVER: "does not fit"}
    patches = [Patch(color=colour, label=names[colour]) for colour in names if colour in colours]
    _legend_above(axes, [*patches, Line2D([], [], color="black", label="capacity")])
    _open_frame(axes)
    return figure


def probability_figure(record: StepRecord, layer_names: Sequence[str]) -> Figure:
    """Plot the probability of every strategy in every layer of the leading plan."""
    title = f"Step {record.step}, leading plan: pp {record.pp}"
    return probability_map(record.probabilities, record.choices, layer_names, title)


def probability_map(
    probabilities: Tensor, choices: Sequence[str], layer_names: Sequence[str], title: str
) -> Figure:
    """Plot probabilities as a heatmap; choices that no layer considers are left out.

    Args:
        probabilities: Shape `(layers, choices)`.
        choices: Their names.
        layer_names: Of the layers.
        title: To which the number of choices left out is added.
    """
    values = probabilities.double().numpy()
    kept = np.flatnonzero(values.max(axis=0) >= NEGLIGIBLE)
    if not len(kept):
        # early and flat: nothing stands out, so nothing may be left out
        kept = np.arange(values.shape[1])
    labels = [choices[index] for index in kept.tolist()]
    width, height = _map_size(len(layer_names), len(kept))
    figure, axes = figure_with_axes(width, height, left=_label_inches(labels), right=1.0, bottom=BOTTOM_NAMES)
    # the square root lets small probabilities show
    image = axes.imshow(values[:, kept].T, aspect="auto", cmap="Blues", interpolation="nearest",
                        norm=PowerNorm(0.5, 0.0, 1.0))  # fmt: skip
    place = axes.get_position()
    colours = figure.add_axes((place.x1 + 0.12 / width, place.y0, 0.15 / width, place.height))
    ticks = [0.0, 0.1, 0.5, 1.0] if height > 2.5 else [0.0, 1.0]
    figure.colorbar(image, cax=colours, ticks=ticks).set_label("probability")
    thin_labels(axes, "y", labels, MAX_ROW_LABELS)
    _layer_axis(axes, layer_names)
    total = values.shape[1]
    rare = f"; {total - len(kept)} of {total} strategies are below {NEGLIGIBLE:.0%} everywhere"
    note = rare if len(kept) < total else ""
    axes.set_title(f"{title}{note}", loc="left", fontsize=10)
    axes.set_ylabel("strategy")
    return figure


def strategies_figure(plan: Plan, layer_names: Sequence[str]) -> Figure:
    """Plot the strategy of every layer, one row for each strategy in use, stages divided by lines."""
    labels = [layer.label() for layer in plan.layers]
    rows = [choice.label() for choice in sorted(set(plan.layers))]
    stages = np.array(plan.stage_of_layer)
    grid = np.full((len(rows), len(labels)), np.nan)
    for layer, label in enumerate(labels):
        grid[rows.index(label), layer] = rows.index(label) % 10
    width, height = _map_size(len(labels), len(rows), 0.3)
    figure, axes = figure_with_axes(
        width, height + 0.35, left=_label_inches(rows), bottom=BOTTOM_NAMES, top=0.5
    )
    # pale bands tell neighbouring stages apart
    axes.imshow((stages % 2)[None, :], aspect="auto", cmap="Greys", vmin=0, vmax=8,
                extent=(-0.5, len(labels) - 0.5, len(rows) - 0.5, -0.5))  # fmt: skip
    axes.imshow(grid, aspect="auto", cmap="tab10", vmin=-0.5, vmax=9.5, interpolation="nearest")
    for first in plan.boundaries[1:-1]:
        axes.axvline(first - 0.5, color="black", linewidth=1.0)
    thin_labels(axes, "y", rows, MAX_ROW_LABELS)
    _layer_axis(axes, layer_names)
    _stage_numbers(axes, plan)
    axes.set_ylabel("strategy")
    return figure


def _stage_numbers(axes: Axes, plan: Plan) -> None:
    """Write stage indices above the picture."""
    every = -(-plan.pp // MAX_LABELS)
    above = axes.secondary_xaxis("top")
    stages = range(0, plan.pp, every)
    middles = [(plan.boundaries[k] + plan.boundaries[k + 1] - 1) / 2 for k in stages]
    above.set_xticks(middles, [str(k) for k in stages])
    above.tick_params(length=0, labelsize=8)
    above.set_xlabel("pipeline stage")


def convergence_figure(history: Sequence[StepRecord]) -> Figure:
    """Plot seconds per iteration by step: of the leading relaxed plan, and of the best hard plan so far."""
    figure, axes = figure_with_axes(7.5, 3.8)
    steps = [record.step for record in history]
    surrogate = [record.surrogate_time_s for record in history]
    axes.plot(steps, surrogate, color=BACKWARD, marker=".", label="surrogate, leading relaxed plan")
    axes.step(steps, [record.best_time_s for record in history], where="post", color=FORWARD, linewidth=2,
              label="best discretized plan so far")  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("seconds per iteration")
    axes.set_title("Convergence of the search", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _open_frame(axes)
    return figure


def figure_with_axes(
    width: float,
    height: float,
    *,
    left: float = 0.75,
    right: float = 0.15,
    bottom: float = 0.55,
    top: float = 0.4,
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes; all sizes and margins in inches."""
    figure = Figure(figsize=(width, height), dpi=110)
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return figure, figure.add_axes(place)


def _map_size(columns: int, rows: int, row_inches: float = 0.17) -> tuple[float, float]:
    """Return inches of a picture of layers by strategies."""
    return min(max(7.0, 2.2 + 0.11 * columns), 15.0), min(1.5 + row_inches * max(rows, 3), 9.0)


def _label_inches(labels: Sequence[str]) -> float:
    """Return room for the longest row label at 8 points, and for the name of the axis."""
    return 0.5 + 0.068 * max(len(label) for label in labels)


def _legend_above(axes: Axes, handles: Sequence[Patch | Line2D]) -> None:
    """Place a legend at the upper right, outside, where it hides nothing."""
    axes.legend(handles=list(handles), loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles),
                frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.0)  # fmt: skip


def _open_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def thin_labels(axes: Axes, axis: str, labels: Sequence[str], limit: int) -> None:
    """Label every n-th tick, so that at most `limit` labels stand."""
    every = -(-len(labels) // limit)
    where = range(0, len(labels), every)
    chosen = [labels[index] for index in where]
    if axis == "y":
        axes.set_yticks(list(where), chosen, fontsize=8)
    else:
        axes.set_xticks(list(where), chosen, fontsize=8, rotation=60, ha="right", rotation_mode="anchor")


def short_names(names: Sequence[str]) -> list[str]:
    """Return numbers of the blocks; whole names of all other layers (`mtp.0`)."""
    return [name.removeprefix("layers.") for name in names]


def _layer_axis(axes: Axes, names: Sequence[str]) -> None:
    """Label layers where names fit; numbered ones only by their number."""
    thin_labels(axes, "x", short_names(names), MAX_LABELS)
    # a search over products gives weights to prime factors of the number of GPUs, not to layers
    axes.set_xlabel("prime factor" if names[0].startswith("factor ") else "layer", labelpad=0)


def write_sweep_curve(path: Path, key: str, points: Sequence[tuple[float, dict[str, float | None]]]) -> None:
    """Draw seconds per iteration, and the raw gap where there is one, over the values of a key.

    Args:
        path: Of the picture, PNG.
        key: What was swept.
        points: Its values with the medians of the measures.
    """
    figure, axes = figure_with_axes(7.5, 3.8, right=0.9)
    ordered = sorted(points, key=lambda point: point[0])
    values = [value for value, _ in ordered]
    times = [measured["iteration_time_s"] or float("nan") for _, measured in ordered]
    axes.plot(values, times, color=FORWARD, marker="o")
    axes.set_xlabel(key)
    axes.set_ylabel("seconds per iteration", color=FORWARD)
    axes.grid(alpha=0.3)
    gaps = [measured["raw_gap"] for _, measured in ordered]
    if any(gap is not None for gap in gaps):
        second = axes.twinx()
        shown = [float("nan") if gap is None else 100.0 * gap for gap in gaps]
        second.plot(values, shown, color=BACKWARD, marker=".", linestyle="--")
        second.set_ylabel("raw gap, %", color=BACKWARD)
    low, high = min(values), max(values)
    if low > 0 and high / low >= 16:
        axes.set_xscale("log")
    axes.set_title(f"Sweep over {key}", loc="left")
    figure.savefig(path)
