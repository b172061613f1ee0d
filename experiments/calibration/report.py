"""Write what a validation says: every row with its prediction, and the tables of its page."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from darts_parallel.errors import DartsParallelError
from darts_parallel.report import markdown_table
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, measured_figures
from experiments.calibration.folds import HeldOut, coverage, fold_errors
from experiments.calibration.parameters import Place
from experiments.calibration.predict import predict
from experiments.calibration.problems import MeasuredCase, read_cases
from experiments.calibration.ranking import (
    CHANCE,
    MODEL,
    ROOFLINE,
    SMALLEST,
    TRIALS,
    JobRanking,
    job_rankings,
    mean,
)
from experiments.data.runs import MeasuredRun

ERRORS = ("median %", "mean %", "bias %", "90 % below")
ERROR_HEADER = ("source", "rows", "s: used", *ERRORS, "memory: used", *ERRORS)
RANKING_HEADER = ("job", "plans", "Spearman", "model 1", "model 3", "roofline 1", "roofline 3", "smallest 1",
                  "smallest 3", "chance 1", "chance 3")  # fmt: skip
FIGURES = {"seconds": ("iteration_s", 1.0), "memory": ("memory_gb", 2.0**-30)}
"""Name and unit of a figure in tables and pictures: seconds, GiB."""
MARKERS = "os^vDP*X<>"


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
    run: MeasuredRun = field(kw_only=True, repr=False)
    case: MeasuredCase | None = field(default=None, repr=False)

    def pair(self, part: str) -> tuple[float, float] | None:
        """Return the predicted and the measured figure of a part where both are known."""
        name, _ = FIGURES[part]
        predicted, measured = (getattr(self, f"{kind}_{name}") for kind in ("predicted", "measured"))
        return None if predicted is None or measured is None else (predicted, measured)


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
        figures: dict[str, Any] = {"case": case}
        for part, measured in measured_figures(case).items():
            name, unit = FIGURES[part]
            figures[f"measured_{name}"] = unit * measured
        for part, (name, unit) in FIGURES.items():
            figures[f"predicted_{name}"] = unit * float(getattr(found, part))
        outcomes.append(replace(outcome, **figures))
    return outcomes


def error_rows(outcomes: Sequence[RowOutcome]) -> list[tuple[str, ...]]:
    """Write one line a file, and one of all: rows, seconds errors, memory errors."""
    files: dict[str, list[RowOutcome]] = defaultdict(list)
    for outcome in outcomes:
        files[outcome.file.removesuffix(".csv")].append(outcome)
    lines = []
    for name, members in (*files.items(), ("all", outcomes)):
        cells = [name, str(len(members))]
        for part in PARTS:
            pairs = [pair for outcome in members if (pair := outcome.pair(part))]
            cells += summarise([p for p, _ in pairs], [m for _, m in pairs]).cells()
        lines.append(tuple(cells))
    return lines


def ranking_rows(jobs: Sequence[JobRanking]) -> list[tuple[str, ...]]:
    """Write one line a job and one of means: plans, Spearman, regrets of one and of three trials by order."""
    orders = [(order, k) for order in (MODEL, ROOFLINE, SMALLEST, CHANCE) for k in TRIALS]
    lines = [(job.name, job.plans, [job]) for job in jobs]
    if jobs:
        lines.append((f"mean of {len(jobs)} jobs", sum(job.plans for job in jobs), list(jobs)))
    return [
        (name, str(plans), f"{mean([job.spearman[MODEL] for job in own]):.2f}",
         *(f"{100 * mean([job.regret[order] for job in own]):.1f}" for order in orders))
        for name, plans, own in lines
    ]  # fmt: skip


def held_out_lines(kind: str, held: Sequence[HeldOut]) -> list[str]:
    """Write what a kind of fold says of the order of plans, and its table: every fold, then all."""
    rows: list[tuple[str, ...]] = []
    for part in PARTS:
        own = [h for h in held if h.part == part]
        for fold, error in fold_errors(own).items():
            share = f"{100 * coverage(own):.0f}" if fold == "all" else ""
            rows.append((fold.removesuffix(".csv"), part, *error.cells(), share))
    timed = [h for h in held if h.part == PARTS[0]]
    jobs = job_rankings([h.case for h in timed], {MODEL: [h.predicted for h in timed]})
    summary = "No job has enough measured plans to rank."
    if jobs:
        first, three, chance = (
            100 * mean([job.regret[order] for job in jobs]) for order in ((MODEL, 1), (MODEL, 3), (CHANCE, 1))
        )
        correlation = mean([job.spearman[MODEL] for job in jobs])
        summary = (
            f"{len(jobs)} jobs: Spearman {correlation:.2f}, regret of the first choice {first:.1f} %, "
            f"of the best of three {three:.2f} %, by chance {chance:.1f} %."
        )
    header = (kind, "figure", "runs", *ERRORS, "80 % intervals hold %")
    return [f"Held out by {kind}. {summary}", "", *markdown_table(header, rows, (0, 1))]


def worst_lines(outcomes: Sequence[RowOutcome], count: int) -> list[str]:
    """List the rows whose seconds or bytes are furthest off."""
    found = []
    for o in outcomes:
        for part in PARTS:
            pair = o.pair(part)
            if pair and o.case:
                ratio, plan = pair[0] / pair[1], o.case.plan.describe(o.run.global_batch_size)
                text = f"- {ratio:.2f} {part}: {o.file}:{o.row}, {o.model}, {plan}"
                found.append((max(ratio, 1.0 / ratio), text))
    return [text for _, text in sorted(found, key=lambda entry: -entry[0])[:count]]


def skipped_lines(outcomes: Sequence[RowOutcome], other_files: Sequence[tuple[str, str]]) -> list[str]:
    """List every row that was not used: file, line, reason; then files of another schema."""
    lines = [f"{o.file}:{o.row}: {o.skipped}" for o in outcomes if o.skipped]
    return lines + [f"{name}: {reason}" for name, reason in other_files]


def skipped_summary(outcomes: Sequence[RowOutcome]) -> str:
    """Count the rows that were used and those that were not, by what is missing."""
    reasons = Counter(o.skipped.split(":")[0].split("=")[0] for o in outcomes if o.skipped)
    most = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))
    shares = []
    for name, own in (("dense models", False), ("mixtures of experts", True)):
        measured = [o for o in outcomes if o.run.mixture == own and o.run.has_figures]
        expressed = sum(not o.skipped for o in measured)
        if measured:
            share = 100.0 * expressed / len(measured)
            shares.append(f"of {len(measured)} of {name} {share:.1f} % are expressible")
    return (
        f"{sum(not o.skipped for o in outcomes)} of {len(outcomes)} rows used; "
        f"{sum(not o.run.has_figures for o in outcomes)} have no measured seconds or bytes; "
        f"{', '.join(shares) or 'none is expressible'}. Most frequent reasons: {most or 'none'}."
    )


def repeat_errors(cases: Sequence[MeasuredCase]) -> ErrorSummary:
    """Summarize the errors of a model that knew the geometric mean of every repeated plan's seconds.

    Repeats are runs of equal model, devices, framework family, plan and job; plans that were measured once
    are left out. A model of plans and hardware cannot be better than this on them.
    """
    groups: dict[object, list[float]] = defaultdict(list)
    for case in cases:
        if case.run.iteration_s is not None:
            config = case.problem.config
            model = replace(case.problem.model.config, name="")  # sources spell it differently
            job = repr((case.run.framework_family, model, config.training, config.cluster))
            groups[job, case.plan].append(case.run.iteration_s)
    repeated = [own for own in groups.values() if len(own) > 1]
    predicted = [geometric_mean(own) for own in repeated for _ in own]
    return summarise(predicted, [seconds for own in repeated for seconds in own])


def repeat_sentence(cases: Sequence[MeasuredCase]) -> str:
    """Tell the errors of `repeat_errors`, dense models and mixtures apart; empty without a repeat."""
    parts = []
    for name, own in (("dense", False), ("mixture", True)):
        found = repeat_errors([case for case in cases if case.problem.model.has_experts == own])
        words = f"{found.count} {name} runs {100 * found.median:.1f} % median, {100 * found.mean:.1f} % mean"
        parts += [words] if found.count else []
    if not parts:
        return ""
    return (
        "One plan of one job in several releases or on several days, against its own geometric mean, which "
        f"no model of plans can beat: {'; '.join(parts)}."
    )


def scatter_figure(outcomes: Sequence[RowOutcome]) -> Figure:
    """Draw predicted against measured figures: seconds to the left, memory to the right; the band is 10 %."""
    figure = Figure(figsize=(12.0, 5.6), layout="constrained")
    labels = ("seconds per iteration", "memory of the fullest device, GiB")
    for axes, part, label in zip(figure.subplots(1, 2), PARTS, labels, strict=True):
        axes.set(xlabel=f"measured {label}", ylabel=f"predicted {label}")
        everything: list[float] = []
        for index, file in enumerate(dict.fromkeys(o.file for o in outcomes)):
            pairs = [pair for o in outcomes if o.file == file and (pair := o.pair(part))]
            if pairs:
                predicted, measured = np.array(pairs).T
                axes.scatter(measured, predicted, s=14, alpha=0.7, marker=MARKERS[index % len(MARKERS)],
                             color=f"C{index % 10}", label=file)  # fmt: skip
                everything += [*predicted, *measured]
        if everything:
            ends = np.array([min(everything) / 1.3, max(everything) * 1.3])
            axes.plot(ends, ends, color="black", linewidth=0.7)
            axes.fill_between(ends, ends / 1.1, ends * 1.1, color="#dddddd", linewidth=0.0, zorder=0)
            axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.grid(color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.axes[0].legend(fontsize=7, frameon=False, loc="upper left")
    return figure
