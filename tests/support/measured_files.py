"""CSV folders of invented runs for the tests of validation and calibration."""

import csv
from pathlib import Path

from experiments.calibration.rows import COLUMNS

RUN = {
    "model": "GPT-tiny", "layers": "4", "hidden": "1024", "heads": "8", "vocab": "32000", "seq_len": "1024",
    "gpu": "A100-SXM4-80GB", "gpus_per_node": "8", "n_gpus": "8", "dp": "4", "tp": "2", "pp": "1",
    "micro_batch": "2", "num_microbatches": "4", "global_batch": "32", "zero": "1", "recompute": "none",
    "precision": "bf16", "iteration_s": "0.5", "source": "a lab's own runs",
}  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> None:
    """Write runs: `RUN` with the cells of each row changed."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**RUN, **row} for row in rows)
