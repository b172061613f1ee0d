"""The cost model against measured runs: seconds per iteration and memory, row by row.

    python -m experiments.validate_cost_model data=FOLDER
    python -m experiments.validate_cost_model data=FOLDER out=outputs/mine parameters=my_calibrated.yaml

Reads every CSV of the folder (columns as in experiments/README.md), predicts each row that the cost model
can express, and prints the error by source and overall, the ranking of strategies, and every row that was
not used with its reason. Leaves validation.csv (one line a row), validation.md and validation.png in `out`.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from darts_parallel.config.options import run_main
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_text
from experiments.calibration.calibrated import SHIPPED, Calibrated
from experiments.calibration.errors import rankings
from experiments.calibration.outcome import Outcome, predict_rows, write_outcomes
from experiments.calibration.rows import read_folder
from experiments.calibration.scatter import scatter_figure
from experiments.calibration.tables import (
    error_table,
    markdown,
    ranking_table,
    skipped_lines,
    skipped_summary,
)
from experiments.comparison.picture import save


@dataclass
class ValidationOptions:
    """What to validate."""

    data: str = ""
    """Folder of CSV files of measured runs."""
    out: str = "outputs/validation"
    parameters: str = str(SHIPPED)
    """Fitted parameters, as python -m experiments.calibrate writes them."""
    worst: int = 15
    """Rows with the largest errors that are printed."""

    def __post_init__(self) -> None:
        if self.worst < 0:
            raise ConfigError(f"worst={self.worst} must be at least 0; nearest legal: 0.")


def validate(options: ValidationOptions) -> int:
    """Predict all rows, print and write the errors; returns the exit status."""
    if not options.data:
        raise ConfigError("data is missing; write data=FOLDER, a folder that holds CSV files of runs.")
    folder = read_folder(options.data)
    parameters = Calibrated.read(Path(options.parameters))
    console = Console(width=None if Console().is_terminal else 150)
    outcomes = predict_rows(folder.rows, parameters)
    used = [o for o in outcomes if not o.skipped]
    groups = rankings([o.case.run for o in used if o.case], [o.seconds or 0.0 for o in used])
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    write_outcomes(out / "validation.csv", outcomes)
    write_text(out / "validation.md", markdown(outcomes, groups) + "\n")
    save(scatter_figure(outcomes), out / "validation.png")
    console.print(error_table(outcomes))
    console.print(ranking_table(groups))
    console.print("Largest errors, predicted / measured:")
    for line in worst_lines(used, options.worst):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    lines = skipped_lines(outcomes, folder.other_files)
    console.print(f"Not used ({len(lines)}):" if lines else "Every row was used.")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(skipped_summary(outcomes), highlight=False, soft_wrap=True)
    console.print(f"{out}/validation.csv, validation.md, validation.png", highlight=False)
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


def main() -> int:
    """Run the command line."""
    return run_main("experiments.validate_cost_model", __doc__, ValidationOptions, validate)


if __name__ == "__main__":
    raise SystemExit(main())
