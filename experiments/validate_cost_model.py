"""The cost model against measured runs: seconds per iteration and memory, row by row.

    python -m experiments.validate_cost_model                                 the shipped runs
    python -m experiments.validate_cost_model data=FOLDER out=outputs/mine    those of a folder alone
    python -m experiments.validate_cost_model parameters=my_calibrated.yaml
    python -m experiments.validate_cost_model held_out=[source,model,family] publish=true      (minutes)

Predicts each run that the cost model can express, and prints the error by source and overall, what the order
of plans costs in every job (rank correlation, regret of the first choice and of the best of three), and every
row that was not used with its reason. A folder holds CSV files (columns: experiments/data/README.md).
`held_out` refits without every whole source, model or framework family and repeats both with predictions that
never saw the fold, and counts how many runs the 80 % intervals hold. Leaves validation.csv (one line a row),
ranking.csv (one line a job), validation.md and validation.png in `out`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from darts_parallel.config import require_at_least, require_members, run_main
from darts_parallel.plan import write_text
from experiments.calibration.calibrated import SHIPPED, Calibrated
from experiments.calibration.fit import residuals
from experiments.calibration.folds import KINDS, cross_validate
from experiments.calibration.parameters import Parameters, Place
from experiments.calibration.problems import MeasuredCase
from experiments.calibration.ranking import (
    MODEL,
    ROOFLINE,
    job_rankings,
    roofline_seconds,
    write_rankings,
)
from experiments.calibration.report import (
    held_out_lines,
    markdown,
    predict_runs,
    repeat_sentence,
    scatter_figure,
    skipped_lines,
    skipped_summary,
    worst_lines,
    write_outcomes,
)
from experiments.data.normalize import read_folder
from experiments.data.runs import read_runs
from experiments.results_page import publish, result_folder
from experiments.study import save_png

METHOD = """\
The runs are those of [`experiments/data/measured.csv`](../data/measured.csv), one row a run with its source
([columns and rules](../data/README.md)). `python -m experiments.calibrate` fits the parameters (robust
least squares on logarithmic errors, Jacobian by autograd through the cost model, priors from data sheets and
micro-benchmarks: [`priors.yaml`](../data/priors.yaml)); `start=conf/calibrated.yaml` begins at the shipped
ones, `shipped=true` overwrites them.

The first table is in sample: the shipped parameters saw these rows. The honest ones are the next:
fitted without the whole source (file), model (by its name) or framework family, each fold the minimum
of the problem linearized at the fit to all, then tried on it. The share of runs inside 80 % intervals
is counted with spreads read off the other folds. The last table is what an order of plans costs in one
measured job: regret of the first choice and of the best of three, in percent, of the model's order, of
a roofline's (peak rates, no overhead), of the smallest tp x pp first, and by chance."""


@dataclass
class ValidationOptions:
    """Command line of `python -m experiments.validate_cost_model`."""

    data: str = ""
    """Folder of CSV files of measured runs; empty: the shipped runs."""
    out: str = "outputs/validation"
    parameters: str = str(SHIPPED)
    """Fitted parameters, as python -m experiments.calibrate writes them."""
    held_out: list[str] = field(default_factory=list)
    """Also with parameters that never saw the whole source, model or family; none: only as given."""
    publish: bool = False
    """Write experiments/results/validation.md, too."""
    worst: int = 15
    """Rows with the largest errors that are printed."""

    def __post_init__(self) -> None:
        require_members("held_out", self.held_out, tuple(KINDS))
        require_at_least("worst", self.worst, 0)


def validate(options: ValidationOptions) -> int:
    """Predict all rows, print and write the errors; returns the exit status."""
    runs, others = read_folder(options.data) if options.data else (read_runs(), [])
    parameters = Calibrated.read(Path(options.parameters))
    outcomes = predict_runs(runs, parameters)
    cases = [o.case for o in outcomes if o.case]
    scores = {MODEL: [o.predicted[0] for o in outcomes if o.case], ROOFLINE: roofline_seconds(cases)}
    jobs = job_rankings(cases, scores)
    out = result_folder(options.out)
    write_outcomes(out / "validation.csv", outcomes)
    write_rankings(out / "ranking.csv", jobs)
    reports = held_out_reports(cases, parameters, options.held_out)
    text = markdown(outcomes, jobs, reports)
    write_text(out / "validation.md", text + "\n")
    save_png(scatter_figure(outcomes), out / "validation.png")
    counts = f"{skipped_summary(outcomes)} {repeat_sentence(cases)}".strip()
    if options.publish:
        command = "python -m experiments.validate_cost_model held_out=[source,model,family] publish=true"
        captions = {out / "validation.png": "predicted against measured, by source"}
        page = f"{METHOD}\n\n{counts}\n\n{text}"
        publish("validation", "How far is the cost model from measured runs?", command, page, captions)
    print(text + "\n")
    unused = skipped_lines(outcomes, others)
    for title, lines in (
        ("Largest errors, predicted / measured:", worst_lines(outcomes, options.worst)),
        (f"Not used ({len(unused)}):" if unused else "Every row was used.", unused),
        (counts, []),
        (f"{out}/validation.csv, ranking.csv, validation.md, validation.png", []),
    ):
        print("\n  ".join([title, *lines]))
    return 0


def held_out_reports(cases: list[MeasuredCase], start: Calibrated, kinds: list[str]) -> list[list[str]]:
    """Refit without every fold of some kinds, each by one Gauss-Newton step from the parameters given.

    Args:
        start: Parameters near the optimum of these runs.
    """
    if not kinds:
        return []
    parameters = Parameters(Place.of_run(case.run) for case in cases)
    latent = start.latent(parameters)
    found = residuals(cases, parameters, latent)
    return [held_out_lines(kind, cross_validate(cases, parameters, latent, found, kind)) for kind in kinds]


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.validate_cost_model", __doc__, ValidationOptions, validate))
