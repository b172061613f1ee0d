"""State how far the gradient search is from the oracle: over all runs, and problem by problem."""

from collections.abc import Sequence

from darts_parallel.report import markdown_table
from experiments.comparison.quantiles import EXACT, percent, quantile
from experiments.comparison.runs import ORACLE, SEARCH, UNIFORM, MethodRun, grouped, median_of

SHARES = (5, 25, 50, 75, 95, 100)
"""Quantiles of the distribution, percent."""
EXACT_SHARE = 0.95
"""Share of runs that should end at the optimum."""
LARGE = 0.01
"""Polished gap that no run should exceed."""


def _proven(runs: Sequence[MethodRun]) -> set[str]:
    """Name the problems that the oracle proved: other gaps are from a lower bound."""
    return {run.problem for run in runs if run.method == ORACLE and run.proven}


def _solved(runs: Sequence[MethodRun]) -> list[MethodRun]:
    proven = _proven(runs)
    return [run for run in runs if run.method == SEARCH and run.problem in proven]


def _raw_gaps(runs: Sequence[MethodRun]) -> list[float]:
    return [run.raw_gap for run in runs if run.raw_gap is not None]


def distribution(runs: Sequence[MethodRun]) -> list[str]:
    """Return the quantiles of raw and polished gaps over all runs, and whether each target is met."""
    solved = _solved(runs)
    if not solved:
        return []
    raw = _raw_gaps(solved)
    polished = [run.gap for run in solved]
    shares = ["max" if share == 100 else f"{share}%" for share in SHARES]
    lines = [_gap_line("raw", raw), _gap_line("polished", polished)]
    exact = sum(gap < EXACT for gap in polished) / len(polished)
    worst = max(polished)
    median = quantile(raw, 50)
    often = f"{exact:.1%}, {_met(exact >= EXACT_SHARE)}"
    return [
        *markdown_table(("gap", "runs", "exactly 0", *shares), lines),
        "",
        f"- polished gap 0 % in at least 95 % of runs: {often}",
        f"- polished gap never above 1 %: {percent(worst)}, {_met(worst <= LARGE)}",
        f"- raw gap median below 1 %: {percent(median)}, {_met(median < LARGE)}",
    ]


def _gap_line(name: str, gaps: Sequence[float]) -> list[str]:
    exact = sum(abs(gap) < EXACT for gap in gaps) / len(gaps)
    spread = [percent(quantile(gaps, share)) for share in SHARES]
    return [name, str(len(gaps)), f"{exact:.1%}", *spread]


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def remarks(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for every missed optimum, every stopped oracle and every contradiction."""
    proven = _proven(runs)
    missed: list[str] = []
    stopped: list[str] = []
    contradictions: list[str] = []
    for run in sorted(_solved(runs), key=lambda run: -run.gap):
        if run.gap >= EXACT:
            gaps = f"polished {percent(run.gap)}, raw {percent(run.raw_gap)}"
            missed.append(f"- {run.problem}, seed {run.seed}: {gaps}")
    for run in runs:
        if run.method == ORACLE and not run.proven:
            stopped.append(
                f"- The oracle stopped early on {run.problem}: "
                "gaps are from its bound and count in no statistic."
            )
        if run.gap <= -EXACT and run.problem in proven:
            contradictions.append(
                f"- Contradiction: {run.method} is better than the proven answer on {run.problem}, "
                f"seed {run.seed}, by {-run.gap:.1e}: the oracle or the cost is wrong."
            )
    return missed + stopped + contradictions


def problem_table(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for each problem: the oracle, the best uniform plan, the gradient search."""
    header = (
        "problem",
        "oracle s/iteration",
        "oracle seconds",
        "uniform gap",
        "raw median",
        "raw max",
        "polished median",
        "polished max",
        "search seconds",
    )
    lines = []
    for problem, rows in grouped(runs, "problem").items():
        methods = grouped(rows, "method")
        if ORACLE in methods:
            lines.append((problem, *_problem_cells(methods)))
    return markdown_table(header, lines)


def _problem_cells(methods: dict[str, list[MethodRun]]) -> list[str]:
    (oracle,) = methods[ORACLE]
    uniform = methods[UNIFORM][0].gap if UNIFORM in methods else None
    found = methods.get(SEARCH, [])
    seconds = f"{median_of(found, 'seconds'):.1f}" if found else "-"
    mark = "" if oracle.proven else " (bound)"
    return [
        f"{oracle.iteration_time_s:.5g}{mark}",
        f"{oracle.seconds:.1f}",
        percent(uniform),
        *_median_and_max(_raw_gaps(found)),
        *_median_and_max([run.gap for run in found]),
        seconds,
    ]


def _median_and_max(gaps: Sequence[float]) -> tuple[str, str]:
    if not gaps:
        return "-", "-"
    return percent(quantile(gaps, 50)), percent(max(gaps))
