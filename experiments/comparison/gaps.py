"""Statistics of gaps: what the tables and pictures of a comparison show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.comparison.quantiles import EXACT, quantile
from experiments.comparison.runs import ORACLE, SEARCH, UNIFORM, Run

SHARES = (5, 25, 50, 75, 95, 100)
"""Quantiles of the distribution, percent."""
LARGE = 0.01
"""No polished gap should be above this."""


@dataclass(frozen=True)
class Distribution:
    """A sample of gaps in numbers."""

    count: int
    exact: float
    """Share of gaps of exactly 0 %, to rounding."""
    quantiles: tuple[float, ...]
    """At `SHARES` percent."""

    @staticmethod
    def of(gaps: Sequence[float]) -> "Distribution":
        """Of at least one gap."""
        exact = sum(abs(value) < EXACT for value in gaps) / len(gaps)
        return Distribution(len(gaps), exact, tuple(quantile(gaps, share) for share in SHARES))


@dataclass(frozen=True)
class ProblemSummary:
    """The rows of one problem in numbers; None where a method did not run."""

    problem: str
    oracle_time_s: float
    oracle_seconds: float
    proven: bool
    uniform: float | None
    raw: tuple[float, ...]
    polished: tuple[float, ...]
    search_seconds: float | None
    """Median."""


def summarise(runs: Sequence[Run]) -> list[ProblemSummary]:
    """One summary for each problem, in the order of the rows."""
    return [
        _summary([run for run in runs if run.problem == name])
        for name in dict.fromkeys(r.problem for r in runs)
    ]


def _summary(runs: Sequence[Run]) -> ProblemSummary:
    oracle = next(run for run in runs if run.method == ORACLE)
    found = [run for run in runs if run.method == SEARCH]
    return ProblemSummary(
        problem=oracle.problem,
        oracle_time_s=oracle.iteration_time_s,
        oracle_seconds=oracle.seconds,
        proven=oracle.proven,
        uniform=next((run.gap for run in runs if run.method == UNIFORM), None),
        raw=tuple(run.raw_gap for run in found if run.raw_gap is not None),
        polished=tuple(run.gap for run in found),
        search_seconds=quantile([run.seconds for run in found], 50) if found else None,
    )


@dataclass(frozen=True)
class Findings:
    """The rows of a whole comparison in numbers."""

    problems: tuple[ProblemSummary, ...]
    raw: Distribution | None
    """Over the runs on problems that the oracle solved; None without any."""
    polished: Distribution | None
    misses: tuple[Run, ...]
    """Searches on solved problems with a polished gap above rounding, worst first."""
    unproven: tuple[str, ...]
    """Problems on which the oracle stopped early: gaps are from its lower bound and do not count."""
    contradictions: tuple[Run, ...]
    """Runs cheaper than the proven answer: the oracle, or the cost, is wrong."""

    @staticmethod
    def of(runs: Sequence[Run]) -> "Findings":
        """Of all rows of a comparison."""
        problems = summarise(runs)
        unproven = tuple(summary.problem for summary in problems if not summary.proven)
        solved = [run for run in runs if run.method == SEARCH and run.problem not in unproven]
        raw = [run.raw_gap for run in solved if run.raw_gap is not None]
        return Findings(
            problems=tuple(problems),
            raw=Distribution.of(raw) if raw else None,
            polished=Distribution.of([run.gap for run in solved]) if solved else None,
            misses=tuple(sorted((r for r in solved if r.gap >= EXACT), key=lambda run: -run.gap)),
            unproven=unproven,
            contradictions=tuple(run for run in runs if run.gap <= -EXACT and run.problem not in unproven),
        )

    def targets(self) -> list[tuple[str, str, bool]]:
        """Name every target, what was measured, and whether it is met."""
        if self.raw is None or self.polished is None:
            return []
        median, worst = self.raw.quantiles[SHARES.index(50)], self.polished.quantiles[-1]
        exact = self.polished.exact
        return [
            ("polished gap 0 % in at least 95 % of runs", f"{exact:.1%}", exact >= 0.95),
            ("polished gap never above 1 %", percent(worst), worst <= LARGE),
            ("raw gap median below 1 %", percent(median), median < LARGE),
        ]


def percent(value: float | None) -> str:
    """A gap for a table: `0`, within rounding, apart from what merely rounds to it."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "no plan"
    if abs(value) < EXACT:
        return "0"
    return f"{100 * value:.3f} %" if abs(value) >= 5e-6 else f"{100 * value:.0e} %"
