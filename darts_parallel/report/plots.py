"""The curve of a sweep; matplotlib is imported with this module."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from darts_parallel.report.journey import COLOURS, thinned


def write_sweep_curve(
    path: Path, key: str, points: Sequence[tuple[float, Mapping[str, float | None]]]
) -> None:
    """Draw seconds per iteration, and the gap of repaired plans if known, over the values of a key."""
    figure = Figure(figsize=(7.5, 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    ordered = sorted(points, key=lambda point: point[0])
    values = [value for value, _ in ordered]
    times = [measured["iteration_time_s"] or float("nan") for _, measured in ordered]
    axes.plot(values, times, color=COLOURS[0], marker="o")
    axes.set_xlabel(key)
    axes.set_ylabel("seconds per iteration", color=COLOURS[0])
    axes.grid(alpha=0.3)
    gaps = [measured.get("repaired_gap") for _, measured in ordered]
    if any(gap is not None for gap in gaps):
        second = axes.twinx()
        shown = [float("nan") if gap is None else 100.0 * gap for gap in gaps]
        second.plot(values, shown, color=COLOURS[1], marker=".", linestyle="--")
        second.set_ylabel("gap of repaired plans, %", color=COLOURS[1])
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
