"""Predict measured runs by the cost model: seconds per iteration and memory, row by row.

    python -m experiments.validate_cost_model                                 the shipped runs
    python -m experiments.validate_cost_model data=FOLDER out=outputs/mine    those of a folder alone
    python -m experiments.validate_cost_model parameters=my_calibrated.yaml
    python -m experiments.validate_cost_model held_out=[house,source,model,device] publish=true      (minutes)

Predicts each run that the cost model can express, and prints the error by source and overall, what the order
of plans costs in every job (rank correlation, regret of the first choice and of the best of three), and every
row that was not used with its reason. Leaves ranking.csv (one line a job, regrets as fractions) next to
validation.csv. A folder holds CSV files (columns: experiments/data/README.md).
`held_out` refits without every whole house (publisher and framework), source or model, repeats both with
predictions that never saw the fold, as fitted and with the average framework's figures of seconds, and
counts how many runs the 80 % intervals hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from darts_parallel.config import one_of, run_main
from darts_parallel.plans import write_text
from darts_parallel.report import markdown_table
from experiments.calibration.calibrated import SHIPPED, Calibrated, Parameters, Place
from experiments.calibration.fit import residuals
from experiments.calibration.folds import (
    KINDS,
    JobRanking,
    cross_validate,
    job_rankings,
    rankings_csv,
)
from experiments.calibration.problems import MeasuredCase
from experiments.calibration.report import (
    ERROR_HEADER,
    RANKING_HEADER,
    RowOutcome,
    coverage_lines,
    error_rows,
    fit_lines,
    held_out_lines,
    predict_runs,
    ranking_rows,
    rival_lines,
    skipped_lines,
    skipped_summary,
    switch_lines,
)
from experiments.data.normalize import read_folder
from experiments.data.runs import read_runs
from experiments.study import Study, StudyOptions, report_text, run_study

SAW = "the head of conf/calibrated.yaml lists the sources that the parameters saw"
METHOD = (
    "One row of [`measured.csv`](../data/measured.csv) a run ([columns, rules, how it is fitted and "
    "judged](../data/README.md)). The hardest comes first: left out of the fit are houses (publisher and "
    "framework), then sources, then models. `averaged frameworks`: figures of seconds without a framework's "
    "own part. `one MFU a device`: the median share of the peak of the other runs on the device. The last "
    "table is what an order of plans costs in one measured job: regret of the first choice "
    "and of the best of three, in percent."
)


@dataclass
class ValidationOptions(StudyOptions):
    """Command line of `python -m experiments.validate_cost_model`."""

    jobs: int = 1
    data: str = ""
    """Folder of CSV files of measured runs; empty: the shipped runs."""
    parameters: str = str(SHIPPED)
    """Fitted parameters, as python -m experiments.calibrate writes them."""
    held_out: list[str] = one_of([], tuple(KINDS))
    """Also with parameters that never saw the whole house, source, model or device; none: only as given."""


def report(
    outcomes: Sequence[RowOutcome],
    parameters: Calibrated,
    options: ValidationOptions,
    jobs: Sequence[JobRanking],
) -> str:
    """Return the errors by source, held out, and of the orders of plans."""
    cases = [o.case for o in outcomes if o.case]
    held_out = held_out_reports(cases, parameters, options.held_out)
    errors = markdown_table(ERROR_HEADER, error_rows(outcomes))
    ranking = markdown_table(RANKING_HEADER, ranking_rows(jobs))
    seen = f"Rows of {options.data}:" if options.data else f"All rows ({SAW}):"
    skipped = skipped_summary(outcomes)
    switches = switch_lines(cases)
    return report_text(METHOD, skipped, switches, *held_out, seen, errors, ranking)


def validate(options: ValidationOptions) -> int:
    """Predict all rows, print and write the errors; returns the exit status."""
    runs, others = read_folder(options.data) if options.data else (read_runs(), [])
    parameters = Calibrated.read(Path(options.parameters))
    outcomes = predict_runs(runs, parameters)
    unused = skipped_lines(outcomes, others)
    print("\n  ".join([f"Not used ({len(unused)}):" if unused else "Every row was used.", *unused]))
    known = [o.predicted_iteration_s or 0.0 for o in outcomes if o.case]
    jobs = job_rankings([o.case for o in outcomes if o.case], known)
    study = Study(
        "validate_cost_model",
        "How far is the cost model from measured runs?",
        "runs of frameworks and GPUs that nobody has published.",
        lambda found: found,
        partial(report, parameters=parameters, options=options, jobs=jobs),
        page="validation",
    )
    status = run_study(study, {"all runs": outcomes}, options)
    write_text(study.folder(options) / "ranking.csv", rankings_csv(jobs))
    return status


def held_out_reports(
    cases: list[MeasuredCase], start: Calibrated, kinds: list[str]
) -> list[list[str]]:
    """Refit without every fold of some kinds, each by one Gauss-Newton step from `start`, near theirs."""
    if not kinds:
        return []
    parameters = Parameters(Place.of_run(case.run) for case in cases)
    latent = start.latent(parameters)
    found = residuals(cases, parameters, latent)
    held_out = {kind: cross_validate(cases, parameters, latent, found, kind) for kind in kinds}
    pages = [held_out_lines(kind, held_out) for kind in kinds]
    rivals = [rival_lines(held_out["source"])] if "source" in held_out else []
    return [fit_lines(held_out), *rivals, coverage_lines(held_out), *pages]


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.validate_cost_model", validate))
