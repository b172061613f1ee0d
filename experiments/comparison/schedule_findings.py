"""State what `compare_schedules` found: gaps by problem and method, and where a rival is better."""

from collections.abc import Sequence

from darts_parallel.exact import USEFUL_SLACK
from darts_parallel.report import markdown_table
from experiments.comparison.controls import CONTROLS
from experiments.comparison.runs import SEARCH, MethodRun, best_known, grouped, median_time
from experiments.comparison.schedules import METHODS

EQUAL = 1e-3
"""Relative distance up to which two plans count as equally good."""


def medians(runs: Sequence[MethodRun]) -> dict[str, dict[str, float]]:
    """Return by problem and method the median gap over seeds to the best plan of all methods."""
    best = best_known(runs)
    gaps: dict[str, dict[str, float]] = {}
    for problem, rows in grouped(runs, "problem").items():
        methods = grouped(rows, "method")
        gaps[problem] = {
            method: median_time(methods[method]) / best[problem] - 1.0
            for method in METHODS
            if method in methods
        }
    return gaps


def gaps_table(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for each problem: every method's median gap, the best plan, the proven bound."""
    gaps = medians(runs)
    lines = []
    for problem, rows in grouped(runs, "problem").items():
        best = min(rows, key=lambda run: run.iteration_time_s)
        bound = best.iteration_time_s / (1.0 + best.gap)
        cells = [_cell(gaps[problem].get(method)) for method in METHODS]
        times = [f"{seconds:.4g} s" for seconds in (best.iteration_time_s, bound)]
        within = _cell(best.gap) if best.gap <= USEFUL_SLACK else "no useful bound"
        lines.append((problem, *cells, best.schedule, *times, within))
    header = ("problem", *METHODS, "best schedule", "best plan", "proven bound", "within")
    return markdown_table(header, lines)


def _cell(gap: float | None) -> str:
    if gap is None:
        return "-"
    return f"{100 * gap:.2f} %" if gap < float("inf") else "no plan"


def verdict(runs: Sequence[MethodRun]) -> list[str]:
    """Say where the gradient search is best or equal, where a rival is better, and what controls do."""
    better: list[str] = []
    ties: list[str] = []
    extra: dict[str, list[float]] = {control: [] for control in CONTROLS}
    problems = medians(runs)
    for problem, gaps in problems.items():
        over = {method: gap - gaps[SEARCH] for method, gap in gaps.items() if method != SEARCH}
        for control, values in extra.items():
            values.append(over.pop(control))
        faster = [method for method, gap in over.items() if gap < -EQUAL]
        if faster:
            better.append(f"- {problem}: better are {', '.join(faster)}.")
        elif min(over.values()) <= EQUAL:
            ties.append(problem)
    good = f"{len(problems) - len(better)} of {len(problems)} problems"
    lines = [f"- The gradient search's median plan is the best or equal on {good}.", *better]
    if ties:
        lines.append(f"- A rival ties on: {', '.join(ties)}.")
    return lines + [_control_line(control, values) for control, values in extra.items()]


def _control_line(control: str, extra: Sequence[float]) -> str:
    equal = sum(abs(gap) <= EQUAL for gap in extra)
    slower = sum(gap > EQUAL for gap in extra)
    faster = len(extra) - equal - slower
    return (
        f"- `{control}`: a median plan equal to the search's (within {EQUAL:.1%}) on {equal} of "
        f"{len(extra)} problems, slower on {slower}, faster on {faster}."
    )
