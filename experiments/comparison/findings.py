"""State how far the gradient search is from the oracle: over all runs, and problem by problem."""

from collections.abc import Sequence

from darts_parallel.report import markdown_table
from experiments.comparison.quantiles import EXACT, percent, quantile
from experiments.comparison.runs import ORACLE, SEARCH, UNIFORM, MethodRun

SHARES = (5, 25, 50, 75, 95, 100)
"""Quantiles of the distribution, percent."""
LARGE = 0.01
"""Polished gap that no run should exceed."""


def _solved(runs: Sequence[MethodRun]) -> list[MethodRun]:
    """Return searches on problems that the oracle proved: other gaps are from a lower bound."""
    proven = {run.problem for run in runs if run.method == ORACLE and run.proven}
    return [run for run in runs if run.method == SEARCH and run.problem in proven]


def distribution(runs: Sequence[MethodRun]) -> list[str]:
    """Return the quantiles of raw and polished gaps over all runs, and whether each target is met."""
    solved = _solved(runs)
    if not solved:
        return []
    polished, raw = (
        [run.gap for run in solved],
        [run.raw_gap for run in solved if run.raw_gap is not None],
    )
    lines = []
    for name, gaps in (("raw", raw), ("polished", polished)):
        exact = sum(abs(gap) < EXACT for gap in gaps) / len(gaps)
        spread = [percent(quantile(gaps, share)) for share in SHARES]
        lines.append((name, str(len(gaps)), f"{exact:.1%}", *spread))
    exact, worst, median = (
        sum(gap < EXACT for gap in polished) / len(polished),
        max(polished),
        quantile(raw, 50),
    )
    targets = [
        ("polished gap 0 % in at least 95 % of runs", f"{exact:.1%}", exact >= 0.95),
        ("polished gap never above 1 %", percent(worst), worst <= LARGE),
        ("raw gap median below 1 %", percent(median), median < LARGE),
    ]
    header = [
        "gap",
        "runs",
        "exactly 0",
        *("max" if share == 100 else f"{share}%" for share in SHARES),
    ]
    return [
        *markdown_table(header, lines),
        "",
        *(
            f"- {target}: {found}, {'met' if met else '**missed**'}"
            for target, found, met in targets
        ),
    ]


def remarks(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for every search that missed the optimum and every oracle that stopped early."""
    solved = _solved(runs)
    proven = {run.problem for run in runs if run.method == ORACLE and run.proven}
    lines = [
        f"- {run.problem}, seed {run.seed}: polished {percent(run.gap)}, raw {percent(run.raw_gap)}"
        for run in sorted(solved, key=lambda run: -run.gap)
        if run.gap >= EXACT
    ]
    lines += [
        f"- The oracle stopped early on {run.problem}: gaps are from its bound and count in no statistic."
        for run in runs
        if run.method == ORACLE and not run.proven
    ]
    return lines + [
        f"- Contradiction: {run.method} is better than the proven answer on {run.problem}, seed {run.seed}, "
        f"by {-run.gap:.1e}: the oracle or the cost is wrong."
        for run in runs
        if run.gap <= -EXACT and run.problem in proven
    ]


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
    for oracle in (run for run in runs if run.method == ORACLE):
        mine = [run for run in runs if run.problem == oracle.problem]
        found = [run for run in mine if run.method == SEARCH]
        uniform = next((run.gap for run in mine if run.method == UNIFORM), None)
        spread = []
        for gaps in ([run.raw_gap for run in found], [run.gap for run in found]):
            known = [gap for gap in gaps if gap is not None]
            spread += [percent(quantile(known, 50)), percent(max(known))] if known else ["-", "-"]
        seconds = f"{quantile([run.seconds for run in found], 50):.1f}" if found else "-"
        mark = "" if oracle.proven else " (bound)"
        lines.append(
            (
                oracle.problem,
                f"{oracle.iteration_time_s:.5g}{mark}",
                f"{oracle.seconds:.1f}",
                percent(uniform),
                *spread,
                seconds,
            )
        )
    return markdown_table(header, lines)
