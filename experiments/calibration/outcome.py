"""Every row of a folder with its prediction or the reason why it has none; `validation.csv`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from darts_parallel.errors import DartsParallelError
from darts_parallel.plan.file import write_text
from darts_parallel.report.tables import csv_text
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.predict import place_of, predict
from experiments.calibration.problems import Case, build_case
from experiments.calibration.rows import Row
from experiments.calibration.rules import read_run

COLUMNS = (
    "file", "row", "model", "measured_iteration_s", "predicted_iteration_s", "measured_memory_gb",
    "predicted_memory_gb", "skipped",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One row: a case with its prediction, or a reason."""

    row: Row
    case: Case | None = None
    seconds: float | None = None
    memory_bytes: float | None = None
    skipped: str = ""


def read_cases(rows: Sequence[Row]) -> list[tuple[Row, Case | str]]:
    """Every row as a case, or the reason why it is none."""
    files: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        files[row.file].append(row)
    result: list[tuple[Row, Case | str]] = []
    for row in rows:
        try:
            result.append((row, build_case(read_run(row, files[row.file]))))
        except DartsParallelError as error:
            result.append((row, str(error)))
    return result


def predict_rows(rows: Sequence[Row], parameters: Calibrated) -> list[Outcome]:
    """Prediction of every row that the cost model can express, in order."""
    return [
        Outcome(row, skipped=case) if isinstance(case, str) else _outcome(row, case, parameters)
        for row, case in read_cases(rows)
    ]


def _outcome(row: Row, case: Case, parameters: Calibrated) -> Outcome:
    try:
        with torch.no_grad():
            found = predict(case, parameters.at(place_of(case)))
    except DartsParallelError as error:
        return Outcome(row, case, skipped=str(error))
    return Outcome(row, case, float(found.seconds), float(found.memory))


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write `validation.csv`: one line a row; seconds, and GiB as the tools print them."""
    rows = []
    for outcome in outcomes:
        run = outcome.case.run if outcome.case and not outcome.skipped else None
        memory = run.memory_bytes if run else None
        rows.append([
            outcome.row.file, outcome.row.line, outcome.row.text("model"),
            _cell(run.iteration_s if run else None), _cell(outcome.seconds),
            _cell(memory and memory / 2**30), _cell(outcome.memory_bytes and outcome.memory_bytes / 2**30),
            outcome.skipped,
        ])  # fmt: skip
    write_text(path, csv_text(COLUMNS, rows))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
