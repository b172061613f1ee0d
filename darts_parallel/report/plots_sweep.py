"""The curve of a sweep over one number."""

from collections.abc import Sequence
from pathlib import Path

from darts_parallel.report.plots import BACKWARD, FORWARD, figure_with_axes


def write_curve(path: Path, key: str, points: Sequence[tuple[float, dict[str, float | None]]]) -> None:
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
        beside = axes.twinx()
        shown = [float("nan") if gap is None else 100.0 * gap for gap in gaps]
        beside.plot(values, shown, color=BACKWARD, marker=".", linestyle="--")
        beside.set_ylabel("raw gap, %", color=BACKWARD)
    low, high = min(values), max(values)
    if low > 0 and high / low >= 16:
        axes.set_xscale("log")
    axes.set_title(f"Sweep over {key}", loc="left")
    figure.savefig(path)
