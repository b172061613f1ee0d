"""Validation by predictions that never saw a run's whole source, model or software family."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from darts_parallel.report.tables import filled_table, markdown_table
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.coverage import cross_coverage
from experiments.calibration.crossvalidation import HeldOut, cross_validate, held_out_errors
from experiments.calibration.errors import ErrorSummary
from experiments.calibration.fit import PARTS, residuals
from experiments.calibration.parameters import Parameters
from experiments.calibration.predict import place_of
from experiments.calibration.problems import Case
from experiments.calibration.ranking import MODEL, JobRanking, job_rankings, mean

HEADERS = ("figure", "runs", "median %", "mean %", "bias %", "90 % below", "80 % intervals hold %")


@dataclass(frozen=True)
class HeldOutReport:
    """Errors, coverage and rankings of one kind of fold."""

    kind: str
    errors: dict[str, dict[str, ErrorSummary]]
    """By figure, then by fold and, under `all`, of all runs."""
    coverage: dict[str, float]
    """By figure: share of the runs inside their 80 % intervals."""
    jobs: list[JobRanking]

    @staticmethod
    def of_kinds(
        cases: Sequence[Case], start: Calibrated, kinds: Sequence[str], roofline: Sequence[float]
    ) -> list["HeldOutReport"]:
        """Refit without every fold of some kinds, each by one Gauss-Newton step from the parameters given.

        Args:
            start: Parameters near the optimum of these runs.
            roofline: What `ranking.roofline_seconds` says of the cases.
        """
        if not kinds:
            return []
        parameters = Parameters(place_of(case) for case in cases)
        latent = start.latent(parameters)
        found = residuals(cases, parameters, latent)
        return [
            HeldOutReport.of_results(
                kind, cases, cross_validate(cases, parameters, latent, found, kind), roofline
            )
            for kind in kinds
        ]

    @staticmethod
    def of_results(
        kind: str, cases: Sequence[Case], results: Sequence[HeldOut], roofline: Sequence[float]
    ) -> "HeldOutReport":
        """The report of predictions that were held out already."""
        coverage = {}
        for part in PARTS:
            held = [h for h in (r.held(part) for r in results) if h is not None]
            if held:
                coverage[part] = cross_coverage(held)
        place = {id(case): i for i, case in enumerate(cases)}
        jobs = job_rankings(
            [r.case for r in results],
            {MODEL: [r.seconds for r in results], "roofline": [roofline[place[id(r.case)]] for r in results]},
        )
        return HeldOutReport(kind, {part: held_out_errors(results, part) for part in PARTS}, coverage, jobs)

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table of errors: every fold's seconds, then all seconds and bytes."""
        lines: list[tuple[str, ...]] = []
        for part in PARTS:
            for fold, e in self.errors[part].items():
                share = f"{100 * self.coverage[part]:.0f}" if fold == "all" and part in self.coverage else ""
                lines.append((fold.removesuffix(".csv"), part, *e.cells(), share))
        return lines

    def summary(self) -> str:
        """The order of plans in one sentence."""
        if not self.jobs:
            return "No job has enough measured plans to rank."
        first, three = (mean([job.regret[MODEL, k] for job in self.jobs]) for k in (1, 3))
        chance = mean([job.random[1] for job in self.jobs])
        correlation = mean([job.spearman[MODEL] for job in self.jobs])
        return (
            f"{len(self.jobs)} jobs: Spearman {correlation:.2f}, regret of the first choice "
            f"{100 * first:.1f} %, of the best of three {100 * three:.2f} %, by chance {100 * chance:.1f} %."
        )

    def table(self) -> Table:
        """Errors of every fold for the terminal."""
        title = f"Held out by {self.kind}. {self.summary()}"
        return filled_table(title, (self.kind, *HEADERS), self.rows(), (0, 1))

    def markdown(self) -> list[str]:
        """Write the table as Markdown."""
        table = markdown_table((self.kind, *HEADERS), self.rows(), (0, 1))
        return [f"Held out by {self.kind}. {self.summary()}", "", *table]
