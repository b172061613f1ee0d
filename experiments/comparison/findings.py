"""State what a comparison found: the standing of every method, gaps by problem, where a method is best."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from darts_parallel.errors import Amounts
from darts_parallel.report import markdown_table
from experiments.comparison.quantiles import EXACT, percent, quantile
from experiments.comparison.runs import (
    SEARCH,
    MethodRun,
    best_known,
    grouped,
    median_of,
)

EQUAL = 1e-3
"""Relative distance up to which two plans count as equally good."""
RAW = "gradient_search, raw"
LABELS = {"galvatron": "galvatron (the solver inside a stage is ours)"}
"""Names of methods that need a remark."""
HEADER = (
    "method",
    "problems",
    "no plan",
    "best",
    "median",
    "95 %",
    "largest",
    "median s",
    "median plans",
)


def medians(runs: Sequence[MethodRun], methods: Sequence[str]) -> dict[str, Amounts]:
    """Return by method and problem the median gap over seeds to the best plan of all methods."""
    best = best_known(runs)
    groups = grouped(runs, "method")
    gaps = {}
    for method in methods:
        problems = grouped(groups.get(method, []), "problem").items()
        gaps[method] = {
            name: median_of(rows, "iteration_time_s") / best[name] - 1.0 for name, rows in problems
        }
    return gaps


def standings(runs: Sequence[MethodRun], methods: Sequence[str]) -> list[str]:
    """Return a line for each method that ran; each problem counts by the median of its seeds."""
    raw = [run for run in runs if run.method == SEARCH and run.raw_time_s is not None]
    rows = list(runs)
    rows += [replace(run, method=RAW, iteration_time_s=run.raw_time_s or inf) for run in raw]
    groups = grouped(rows, "method")
    lines = []
    for method, gaps in medians(rows, (*methods, RAW)).items():
        if gaps:
            found = [gap for gap in gaps.values() if gap < inf]
            exact = sum(gap < EXACT for gap in found)
            missing = len(gaps) - len(found)
            cells = [LABELS.get(method, method), str(len(gaps)), str(missing or "-"), str(exact)]
            cells += [percent(quantile(found, q) if found else None) for q in (50, 95, 100)]
            cells.append(f"{median_of(groups[method], 'seconds'):.2f}")
            lines.append([*cells, f"{median_of(groups[method], 'evaluations'):.0f}"])
    return markdown_table(HEADER, lines)


def gaps_table(runs: Sequence[MethodRun], methods: Sequence[str]) -> list[str]:
    """Return a line for each problem: every method's median gap, the best plan, the proven bound."""
    gaps = medians(runs, methods)
    lines = []
    for problem, rows in grouped(runs, "problem").items():
        best = min(rows, key=lambda run: run.iteration_time_s)
        cells = [percent(gaps[method].get(problem)) for method in methods]
        bound = best.iteration_time_s / (1.0 + best.gap)
        times = [f"{seconds:.5g} s" for seconds in (best.iteration_time_s, bound)]
        lines.append((problem, *cells, *times, percent(best.gap)))
    header = ("problem", *methods, "best plan", "proven bound", "within")
    return markdown_table(header, lines)


def verdict(runs: Sequence[MethodRun], method: str, others: Sequence[str]) -> list[str]:
    """Say where the median plan of a method is the best or equal, and where which other one is better."""
    gaps = medians(runs, (method, *others))
    own = gaps.pop(method)
    better = []
    for problem, gap in own.items():
        faster = [name for name, rows in gaps.items() if rows.get(problem, inf) < gap - EQUAL]
        if faster:
            better.append(f"- {problem}: better are {', '.join(faster)}.")
    equal = f"{len(own) - len(better)} of {len(own)} problems"
    return [f"- The median plan of {method} is the best or equal on {equal}.", *better]


def contradictions(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for each plan that is faster than the proven bound."""
    lines = []
    for run in runs:
        if run.gap <= -EXACT:
            place = f"{run.problem}, seed {run.seed}, by {-run.gap:.1e}"
            lines.append(
                f"- Contradiction: {run.method} is better than the proof on {place}: "
                "the proof or the cost is wrong."
            )
    return lines
