"""CSV folders of invented runs for the tests of validation and calibration."""

import csv
from collections.abc import Sequence
from pathlib import Path

from experiments.calibration.problems import MeasuredCase, read_cases
from experiments.data.normalize import normalized, read_folder
from experiments.data.runs import MeasuredRun
from experiments.data.table import RowError, TableRow

COLUMNS = (
    "model",
    "n_params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "gpu",
    "gpus_per_node",
    "n_gpus",
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "vpp_chunks",
    "micro_batch",
    "num_microbatches",
    "global_batch",
    "zero",
    "recompute",
    "sequence_parallel",
    "precision",
    "iteration_s",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "tflops_kind",
    "mfu_pct",
    "hfu_pct",
    "memory_gb",
    "oom",
    "notes",
    "source",
    "how_read",
)
RUN = {
    "model": "GPT-tiny",
    "layers": "4",
    "hidden": "1024",
    "heads": "8",
    "vocab": "32000",
    "seq_len": "1024",
    "gpu": "A100-SXM4-80GB",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "dp": "4",
    "tp": "2",
    "pp": "1",
    "micro_batch": "2",
    "num_microbatches": "4",
    "global_batch": "32",
    "zero": "1",
    "recompute": "none",
    "precision": "bf16",
    "iteration_s": "0.5",
    "source": "a lab's own runs",
}


def write_rows(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> None:
    """Write runs: `RUN` with the cells of each row changed."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**RUN, **row} for row in rows)


def run_of(row: TableRow, siblings: Sequence[TableRow] = ()) -> MeasuredRun:
    """Normalize a row.

    Errors:
        RowError: it cannot be used.
    """
    run = normalized(row, siblings or [row])
    if run.skipped:
        raise RowError(run.skipped)
    return run


def cases_of(folder: Path) -> list[MeasuredCase]:
    """Build the usable runs of a folder."""
    return [
        case for case in read_cases(read_folder(str(folder))[0]) if isinstance(case, MeasuredCase)
    ]
