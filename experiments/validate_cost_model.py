"""The cost model against measured runs: seconds per iteration and memory, row by row.

    python -m experiments.validate_cost_model data=FOLDER
    python -m experiments.validate_cost_model data=FOLDER out=outputs/mine parameters=my_calibrated.yaml
    python -m experiments.validate_cost_model data=FOLDER held_out=[source,model,family]   (minutes)

Reads every CSV of the folder (columns as in experiments/README.md), predicts each row that the cost model
can express, and prints the error by source and overall, what the order of plans costs in every job (rank
correlation, regret of the first choice and of the best of three), and every row that was not used with its
reason. `held_out` refits without every whole source, model or software family and repeats both with
predictions that never saw the fold, and counts how many runs the 80 % intervals hold. Leaves validation.csv
(one line a row), ranking.csv (one line a job), validation.md, validation.png and ranking.png in `out`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from darts_parallel.config.checks import require_members
from darts_parallel.config.options import run_main
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from experiments.calibration.calibrated import SHIPPED, Calibrated
from experiments.calibration.crossvalidation import KINDS
from experiments.calibration.held_out import HeldOutReport
from experiments.calibration.outcome import Outcome, predict_rows, write_outcomes
from experiments.calibration.ranking import MODEL, job_rankings, roofline_seconds, write_rankings
from experiments.calibration.repeats import repeat_sentence
from experiments.calibration.rows import read_folder
from experiments.calibration.scatter import ranking_figure, scatter_figure
from experiments.calibration.tables import (
    error_table,
    markdown,
    ranking_table,
    skipped_lines,
    skipped_summary,
)
from experiments.comparison.picture import save
from experiments.results_page import console_of, publish, result_folder

METHOD = """\
`data` is a folder of CSV files, one row a run, with the columns `model, n_params, layers, hidden, heads, kv_heads, ffn,
vocab, seq_len, gpu, gpus_per_node, n_gpus, dp, tp, pp, cp, ep, vpp_chunks, micro_batch, num_microbatches, global_batch, zero,
recompute, sequence_parallel, precision, iteration_s, samples_per_s, tokens_per_s_per_gpu, memory_gb, oom, notes, source`.
Only `layers, hidden, gpu, n_gpus` must be there; what a row leaves out follows the rules that
[`calibration/rules.py`](../calibration/rules.py) lists (software: `calibration/stacks.py`, model families:
`calibration/families.py`, GPUs and networks: `calibration/hardware.py`). Rows that cannot be used are printed with file, line
and reason and cost nothing else. The parameters are fitted by `python -m experiments.calibrate data=FOLDER`
(Levenberg-Marquardt on logarithmic errors, Jacobian by autograd through the cost model, priors from data sheets and
micro-benchmarks; a base and deviations of device, software, link and their pairs:
[`calibration/parameters.py`](../calibration/parameters.py)); `start=conf/calibrated.yaml` begins at the shipped ones,
`shipped=true` overwrites them.

The first table is in sample: the shipped parameters saw these rows. The honest ones are the next: fitted without the whole
source (file), model (by its name) or software family, each fold one full Gauss-Newton step from the fit to all, then tried
on it. The share of runs inside 80 % intervals is counted with spreads read off the other folds. The last table is what an
order of plans costs in one measured job: regret of the first choice and of the best of three, in percent, of the model's
order, of a roofline's (peak rates, no overhead), of the smallest tp x pp first, and by chance."""  # noqa: E501


@dataclass
class ValidationOptions:
    """What to validate."""

    data: str = ""
    """Folder of CSV files of measured runs."""
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
        require_members("held_out", self.held_out, KINDS)
        if self.worst < 0:
            raise ConfigError(f"worst={self.worst} must be at least 0; nearest legal: 0.")


def validate(options: ValidationOptions) -> int:
    """Predict all rows, print and write the errors; returns the exit status."""
    folder = read_folder(options.data)
    parameters = Calibrated.read(Path(options.parameters))
    console = console_of(150)
    outcomes = predict_rows(folder.rows, parameters)
    used = [o for o in outcomes if not o.skipped]
    cases = [o.case for o in used if o.case]
    scores = {MODEL: [o.seconds or 0.0 for o in used if o.case], "roofline": roofline_seconds(cases)}
    jobs = job_rankings(cases, scores)
    out = result_folder(options.out)
    write_outcomes(out / "validation.csv", outcomes)
    held_out = HeldOutReport.of_kinds(cases, parameters, options.held_out, scores["roofline"])
    write_rankings(out / "ranking.csv", jobs)
    text = markdown(outcomes, jobs, held_out)
    write_text(out / "validation.md", text + "\n")
    save(scatter_figure(outcomes), out / "validation.png")
    save(ranking_figure(jobs), out / "ranking.png")
    if options.publish:
        command = "python -m experiments.validate_cost_model data=FOLDER held_out=[source,model,family]"
        captions = {
            out / "validation.png": "predicted against measured, by source",
            out / "ranking.png": "what the order of plans costs in every job",
        }
        page = f"{METHOD}\n\n{skipped_summary(outcomes)} {repeat_sentence(cases)}\n\n{text}"
        publish("validation", "How far is the cost model from measured runs?", command, page, captions)
    console.print(error_table(outcomes))
    console.print(ranking_table(jobs))
    for report in held_out:
        console.print(report.table())
    console.print("Largest errors, predicted / measured:")
    for line in worst_lines(used, options.worst):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    lines = skipped_lines(outcomes, folder.other_files)
    console.print(f"Not used ({len(lines)}):" if lines else "Every row was used.")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(skipped_summary(outcomes), highlight=False, soft_wrap=True)
    console.print(repeat_sentence(cases), highlight=False, soft_wrap=True)
    console.print(
        f"{out}/validation.csv, ranking.csv, validation.md, pictures", highlight=False, markup=False
    )
    return 0


def worst_lines(outcomes: list[Outcome], count: int) -> list[str]:
    """The rows whose seconds or bytes are furthest off."""
    found = []
    for outcome in outcomes:
        if outcome.case is None:
            continue
        run = outcome.case.run
        plan = outcome.case.plan.describe(run.global_batch)
        for name, predicted, measured in (
            ("seconds", outcome.seconds, run.iteration_s),
            ("memory", outcome.memory_bytes, run.memory_bytes),
        ):
            if predicted and measured:
                ratio = predicted / measured
                row = outcome.row
                text = f"{ratio:.2f} {name}  {row.file}:{row.line}  {row.text('model')}, {plan}"
                found.append((max(ratio, 1.0 / ratio), text))
    return [text for _, text in sorted(found, key=lambda entry: -entry[0])[:count]]


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.validate_cost_model", __doc__, ValidationOptions, validate))
