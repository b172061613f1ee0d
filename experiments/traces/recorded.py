"""Recorded steps of pipelines, operation by operation, read from CSV files.

Columns: `step, dp_rank, stage, optype, mb_id, seq_id, start_ts, duration`; times in seconds. Files are named
`trace-NAME.csv` or `trace-NAME.csv.gz`.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from darts_parallel.errors import ConfigError

COLUMNS = ("step", "dp_rank", "stage", "optype", "mb_id", "seq_id", "start_ts", "duration")
FORWARD, BACKWARD = "forward-compute", "backward-compute"


class Entry(NamedTuple):
    """One recorded operation."""

    dp_rank: int
    stage: int
    micro_batch: int
    start: float
    """Seconds from an origin that all operations of a step share."""
    duration: float
    """Seconds."""

    @property
    def end(self) -> float:
        """Seconds from the origin."""
        return self.start + self.duration


@dataclass(frozen=True)
class RecordedStep:
    """All operations of one step of one job."""

    trace: str
    step: int
    entries: dict[str, list[Entry]] = field(repr=False)
    """By kind of operation, in the order in which they began."""

    @property
    def measured_s(self) -> float:
        """Seconds from the beginning of the first forward pass to the end of the last operation."""
        begin = min(entry.start for entry in self.entries[FORWARD])
        return max(entry.end for entries in self.entries.values() for entry in entries) - begin


def trace_files(folder: str) -> list[Path]:
    """The traces of a folder by name.

    Errors:
        ConfigError: there is none.
    """
    found = [path for pattern in ("trace-*.csv", "trace-*.csv.gz") for path in Path(folder).glob(pattern)]
    if not found:
        raise ConfigError(
            f"data={folder} must be a folder that holds trace-NAME.csv or trace-NAME.csv.gz; "
            "try one with recorded steps."
        )
    return sorted(found)


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """The steps of a trace in the order of their numbers.

    Errors:
        ConfigError: a column is missing, a cell holds no number, or a step has no forward pass.
    """
    name = path.name.removeprefix("trace-").split(".csv")[0]
    steps: dict[int, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for line, row in _rows(path):
        try:
            entry = Entry(
                int(row["dp_rank"]), int(row["stage"]), int(row["mb_id"]),
                float(row["start_ts"]), float(row["duration"]),
            )  # fmt: skip
            steps[int(row["step"])][row["optype"]].append(entry)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{path.name}: line {line} must hold a number in every column but optype; try 0."
            ) from None
    for step in sorted(steps):
        if FORWARD not in steps[step] or BACKWARD not in steps[step]:
            raise ConfigError(
                f"{path.name}: step {step} must hold {FORWARD} and {BACKWARD}; try a whole step."
            )
        ordered = {kind: sorted(own, key=lambda e: e.start) for kind, own in steps[step].items()}
        yield RecordedStep(name, step, ordered)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path.name}: the column {missing[0]} is missing; try {','.join(COLUMNS)}."
                )
            yield from enumerate(reader, start=2)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read ({error}); try a CSV file.") from None
