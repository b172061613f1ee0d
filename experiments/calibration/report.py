"""Write what a validation says: every row with its prediction, and the tables of its page."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from darts_parallel.errors import DartsParallelError, Entries
from darts_parallel.planner import NORMAL
from darts_parallel.problem import read_rows
from darts_parallel.report import markdown_table
from experiments.calibration.calibrated import Calibrated, Place
from experiments.calibration.errors import summarise
from experiments.calibration.fit import PARTS, measured_figures
from experiments.calibration.folds import (
    CHANCE,
    FIT,
    MODEL,
    ORDERS,
    TOTALS,
    TRIALS,
    HeldOut,
    HeldOutByKind,
    JobRanking,
    constant_mfu,
    fold_errors,
    job_of,
    job_rankings,
    mean,
    one_factor,
    standardized,
)
from experiments.calibration.predict import predict
from experiments.calibration.problems import MeasuredCase, read_cases
from experiments.data import DATA
from experiments.data.runs import MeasuredRun
from experiments.data.table import word_tables

ERRORS = ("median %", "mean %", "bias %", "90 % below")
ERROR_HEADER = ("source", "rows", "s: used", *ERRORS, "memory: used", *ERRORS)
COLUMNS = tuple(product(ORDERS, TRIALS))
"""Order and number of trials of every regret."""
RANKING_HEADER = ("job", "plans", "Spearman", *(f"{order} {trials}" for order, trials in COLUMNS))
SWITCHES: list[str] = word_tables()["shown_switches"]
"""Columns of a run that are keys of `training` and change its seconds or bytes."""
FIGURES = {"seconds": ("iteration_s", 1.0), "memory": ("memory_gb", 2.0**-30)}
"""Name and unit of a figure in tables and pictures: seconds, GiB."""
Rows = Sequence[tuple[str, ...]]
"""Cells of a table, row by row."""
RIVALS = DATA / "rivals.csv"
"""Seconds that other programs predict for the shipped runs."""
NOMINAL = (0.5, 0.8, 0.9, 0.95)
BOUNDS = (0.2, 0.5, 0.8, 0.9)


@dataclass(frozen=True)
class RowOutcome:
    """One row: measured and predicted seconds and GiB, or a reason."""

    file: str
    row: int
    model: str
    measured_iteration_s: float | None = None
    predicted_iteration_s: float | None = None
    measured_memory_gb: float | None = None
    predicted_memory_gb: float | None = None
    skipped: str = ""
    fits: bool | None = None
    """Whether the predicted peak is within the capacity."""
    run: MeasuredRun = field(kw_only=True, repr=False)
    case: MeasuredCase | None = field(default=None, repr=False)

    def ratio(self, part: str) -> float | None:
        """Return the predicted over the measured figure of a part where both are known."""
        name, _ = FIGURES[part]
        measured = getattr(self, f"measured_{name}")
        return None if measured is None else getattr(self, f"predicted_{name}") / measured


def predict_runs(runs: Sequence[MeasuredRun], parameters: Calibrated) -> list[RowOutcome]:
    """Predict every run that the cost model can express, in order."""
    outcomes = []
    for run, case in zip(runs, read_cases(runs), strict=True):
        outcome = RowOutcome(run.file, run.row, run.model, run=run)
        try:
            if isinstance(case, str):
                raise DartsParallelError(case)
            with torch.no_grad():
                found = predict(case, parameters.at(Place.of_run(run)))
        except DartsParallelError as error:
            outcomes.append(replace(outcome, skipped=str(error)))
            continue
        figures: Entries = {"case": case, "fits": found.fits}
        for part, measured in measured_figures(case).items():
            name, unit = FIGURES[part]
            figures[f"measured_{name}"] = unit * measured
        for part, (name, unit) in FIGURES.items():
            figures[f"predicted_{name}"] = unit * float(getattr(found, part))
        outcomes.append(replace(outcome, **figures))
    return outcomes


def error_rows(outcomes: Sequence[RowOutcome]) -> Rows:
    """Write one line a file, and one of all: rows, seconds errors, memory errors."""
    files = defaultdict(list)
    for outcome in outcomes:
        files[outcome.file.removesuffix(".csv")].append(outcome)
    lines = []
    for name, members in (*files.items(), ("all", outcomes)):
        cells = [name, str(len(members))]
        for part in PARTS:
            ratios = [outcome.ratio(part) for outcome in members]
            cells += summarise([ratio for ratio in ratios if ratio is not None]).cells()
        lines.append(tuple(cells))
    return lines


def mean_regrets(jobs: Sequence[JobRanking]) -> dict[tuple[str, int], float]:
    """Return the mean regrets of jobs by order and number of trials, in percent."""
    return {column: 100 * mean([job.regret[column] for job in jobs]) for column in COLUMNS}


def ranking_rows(jobs: Sequence[JobRanking]) -> Rows:
    """Write one line a job and one of means: plans, Spearman, regrets of one and of three trials by order."""
    lines = [(job.name, job.plans, [job]) for job in jobs]
    if jobs:
        lines.append((f"mean of {len(jobs)} jobs", sum(job.plans for job in jobs), list(jobs)))
    rows = []
    for name, plans, own in lines:
        correlation = mean([job.spearman for job in own])
        regrets = [f"{regret:.1f}" for regret in mean_regrets(own).values()]
        rows.append((name, str(plans), f"{correlation:.2f}", *regrets))
    return rows


def held_out_lines(kind: str, held_out: HeldOutByKind) -> list[str]:
    """Write what a kind of fold says of the order of plans, and its table: every fold, then all."""
    rows = []
    held = held_out[kind]
    for part in PARTS:
        scores = standardized(held_out, kind, part)
        own = [h for h in held if h.part == part]
        for fold, error in fold_errors(own).items():
            members = [h.case for h in own if fold in (h.fold, h.total, TOTALS[-1])]
            plans = len({(case.plan, job_of(case.run)) for case in members})
            share = (
                f"{100 * np.mean(np.abs(scores[fold][:, 0]) <= NORMAL):.0f}"
                if fold in scores
                else ""
            )
            rows.append((fold.removesuffix(".csv"), part, *error.cells(), share, str(plans)))
        if part == PARTS[0]:
            others = {
                "averaged frameworks": [replace(h, predicted=h.averaged) for h in own],
                "one MFU a device": constant_mfu(own),
            }
            for name, other in others.items():
                errors = fold_errors(other)
                rows += [
                    (f"{fold}, {name}", part, *errors[fold].cells(), "", "")
                    for fold in TOTALS
                    if fold in errors
                ]
    timed = [h for h in held if h.part == PARTS[0]]
    jobs = job_rankings([h.case for h in timed], [h.predicted for h in timed])
    summary = "No job has enough measured plans to rank."
    if jobs:
        regret = mean_regrets(jobs)
        correlation = mean([job.spearman for job in jobs])
        summary = (
            f"{len(jobs)} jobs: Spearman {correlation:.2f}, "
            f"regret of the first choice {regret[MODEL, 1]:.1f} %, "
            f"of the best of three {regret[MODEL, 3]:.2f} %, by chance {regret[CHANCE, 1]:.1f} %."
        )
    header = (kind, "figure", "runs", *ERRORS, "80 % intervals hold %", "distinct plans")
    return titled_table(f"Held out by {kind}. {summary}", header, rows)


def titled_table(title: str, header: Sequence[str], rows: Rows) -> list[str]:
    """Write a sentence and the table that it introduces."""
    return [title, "", *markdown_table(header, rows, (0, 1))]


def switch_lines(cases: Sequence[MeasuredCase]) -> list[str]:
    """Write how many runs have each value of a switch, and in how many frameworks it varies."""
    rows = []
    for switch in SWITCHES:
        pairs = [(case.run.framework, getattr(case.run, switch)) for case in cases]
        counts = Counter("unknown" if value is None else str(value) for _, value in pairs)
        told = ", ".join(f"{value} {n}" for value, n in counts.most_common())
        varied = Counter(framework for framework, value in set(pairs) if value is not None)
        rows.append((switch, told, str(sum(n > 1 for n in varied.values()))))
    header = ("switch", "runs by value", "varies in frameworks")
    return titled_table("Switches of the runs.", header, rows)


def coverage_lines(held_out: HeldOutByKind) -> list[str]:
    """Write which share of the left-out runs intervals hold, and is below bounds, of a nominal share.

    Memory below its bound of 80 %: of plans said to fit with 80 % on a device just so large, those that did.
    """
    rows = []
    normal = NormalDist()
    for kind, part in product(held_out, PARTS):
        for total, found in standardized(held_out, kind, part).items():
            scores, widths = found.T
            shares = [np.mean(np.abs(scores) <= normal.inv_cdf(0.5 + n / 2)) for n in NOMINAL]
            shares += [np.mean(scores >= -normal.inv_cdf(n)) for n in BOUNDS]
            shares.append(np.expm1(NORMAL * np.median(widths)))
            told = (f"{100 * share:.0f}" for share in shares)
            rows.append((kind, f"{part}, {total}", str(len(scores)), *told))
    nominal = [f"{100 * n:.0f} %" for n in NOMINAL] + [f"below {100 * n:.0f} %" for n in BOUNDS]
    nominal += ["80 % half width, %"]
    title = (
        "Shares of runs inside intervals, and below upper bounds, of a nominal share. Memory below "
        "its bound: of plans that are said to fit with this chance, how many did. Half width: the "
        "median."
    )
    return titled_table(title, ("left out", "figure", "runs", *nominal), rows)


def fit_lines(held_out: HeldOutByKind) -> list[str]:
    """Write how many runs are said to fit, of those that ran and of those that ended for want of memory."""
    rows = []
    for kind, held in held_out.items():
        fits = [h for h in held if h.part == FIT]
        for total in TOTALS:
            own = [h for h in fits if total in (h.total, TOTALS[-1])]
            ran, out = ([h.predicted for h in own if h.measured == had] for had in (True, False))
            if ran:
                refused = ran.count(False)
                share = f"{100 * refused / len(ran):.1f}"
                rows.append(
                    (kind, total, *map(str, (len(ran), refused, share, len(out), out.count(True))))
                )
    header = ("left out", "runs", "ran", "refused", "refused %", "out of memory", "said to fit")
    title = "Fit: the median peak is within the capacity (recomputation not printed: that of full)."
    return titled_table(title, header, rows)


def rival_lines(held: Sequence[HeldOut], path: Path = RIVALS) -> list[str]:
    """Write the errors of other programs' seconds next to ours, on the runs that each can express.

    Args:
        held: Left-out runs; a program gets its factor of a device from the runs of other folds.
    """
    own = {(h.case.run.file, str(h.case.run.row)): h for h in held if h.part == PARTS[0]}
    told = defaultdict(list)
    for _, cells in read_rows(path, ()):
        if mine := own.get((cells["file"], cells["row"])):
            other = replace(mine, predicted=float(cells["seconds"]))
            told[f"{cells['program']} {cells['version']}"].append((mine, other))
    rows = []
    for (program, pairs), total in product(told.items(), TOTALS[:2]):
        ours, theirs = ([pair[i] for pair in pairs if pair[0].total == total] for i in (0, 1))
        scaled = f"{program}, one factor a device"
        who = {"ours": ours, program: theirs, scaled: one_factor(theirs)}
        for name, errors in who.items():
            if errors:
                found = summarise([h.ratio for h in errors])
                rows.append((name, total, *found.cells()))
    title = "Other programs on the runs that each can express ([how](../data/README.md)), ours by source."
    return titled_table(title, ("seconds of", "runs of", "runs", *ERRORS), rows)


def skipped_lines(
    outcomes: Sequence[RowOutcome], other_files: Sequence[tuple[str, str]]
) -> list[str]:
    """List every row that was not used: file, line, reason; then files of another schema."""
    lines = [f"{o.file}:{o.row}: {o.skipped}" for o in outcomes if o.skipped]
    return lines + [f"{name}: {reason}" for name, reason in other_files]


def skipped_summary(outcomes: Sequence[RowOutcome]) -> str:
    """Count the rows that were used and those that were not, by what is missing."""
    reasons = Counter(o.skipped.split(":")[0].split("=")[0] for o in outcomes if o.skipped)
    most = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))
    used = sum(not o.skipped for o in outcomes)
    return f"{used} of {len(outcomes)} rows used. Most frequent reasons of the others: {most}."
