"""The picture of a comparison: how the gaps are distributed, and over which problems."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.comparison.gaps import Findings, ProblemSummary
from experiments.comparison.quantiles import EXACT

RAW, POLISHED, UNIFORM = "#e1973c", "#4878a8", "#8a8a8a"
SMALLEST = 1e-3
"""Percent; the axis is linear below this, so that 0 has a place."""


def gaps_figure(findings: Findings) -> Figure:
    """Left: share of runs by gap. Right: every run of every problem."""
    count = len(findings.problems)
    figure = Figure(figsize=(13.0, max(1.6 + 0.23 * count, 4.2)), layout="constrained")
    share, each = figure.subplots(1, 2, width_ratios=(1.0, 1.3))
    solved = [summary for summary in findings.problems if summary.proven]
    limit = _limit(findings.problems)
    for name, colour, gaps in (
        ("raw", RAW, [gap for summary in solved for gap in summary.raw]),
        ("polished", POLISHED, [gap for summary in solved for gap in summary.polished]),
    ):
        _draw_share(share, gaps, limit, name, colour)
    share.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
    share.set_ylim(0.0, 1.02)
    share.set_ylabel("share of runs with at most this gap")
    share.set_title("Solved problems", fontsize=10, loc="left")
    _draw_problems(each, findings.problems, limit)
    each.set_title("Every run", fontsize=10, loc="left")
    for axes in (share, each):
        axes.set_xscale("symlog", linthresh=SMALLEST, linscale=0.5)
        axes.set_xlim(-0.2 * SMALLEST, limit)
        ticks = [0.0, *(10.0**power for power in range(-3, 4) if 10.0**power <= limit)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel("gap to the oracle, %")
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8, frameon=False)
    return figure


def _limit(problems: Sequence[ProblemSummary]) -> float:
    """Right end of the axis, percent; runs without a plan are drawn there."""
    values = [gap for s in problems for gap in (*s.raw, *s.polished, s.uniform or 0.0)]
    return 2.0 * max([1.0, *(100.0 * value for value in values if np.isfinite(value))])


def _draw_share(axes: Axes, gaps: Sequence[float], limit: float, name: str, colour: str) -> None:
    if not gaps:
        return
    percents = np.sort(np.minimum(_percents(gaps), limit))
    shares = np.arange(1, len(percents) + 1) / len(percents)
    x = np.concatenate([[-SMALLEST], percents, [limit]])
    axes.step(
        x,
        np.concatenate([[0.0], shares, [1.0]]),
        where="post",
        color=colour,
        label=f"{name} ({len(gaps)} runs)",
    )


def _draw_problems(axes: Axes, problems: Sequence[ProblemSummary], limit: float) -> None:
    """Runs of one problem lie on one line, polished ones above raw ones."""
    rows: list[tuple[str, str, str, float, list[tuple[int, float]]]] = [
        ("best uniform plan", UNIFORM, "|", 0.0,
         [(i, s.uniform) for i, s in enumerate(problems) if s.uniform is not None]),
        ("raw", RAW, "o", 0.15, [(i, gap) for i, s in enumerate(problems) for gap in s.raw]),
        ("polished", POLISHED, "o", -0.15, [(i, gap) for i, s in enumerate(problems) for gap in s.polished]),
    ]  # fmt: skip
    for name, colour, marker, shift, points in rows:
        if points:
            x = np.minimum(_percents([gap for _, gap in points]), limit)
            y = [index + shift for index, _ in points]
            axes.scatter(
                x, y, s=60 if marker == "|" else 14, c=colour, marker=marker, label=name, clip_on=False
            )
    names = [s.problem if s.proven else f"{s.problem} (to the bound)" for s in problems]
    axes.set_yticks(range(len(problems)), names, fontsize=7)
    axes.set_ylim(len(problems) - 0.4, -0.6)


def _percents(gaps: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Rounding becomes 0, so that it does not look like a gap."""
    values = np.asarray(gaps, dtype=np.float64)
    return np.where(np.abs(values) < EXACT, 0.0, 100.0 * values)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    FigureCanvasAgg(figure).print_png(str(path))  # type: ignore[no-untyped-call]
