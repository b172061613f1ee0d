"""Rows of a folder of CSV files as text, and what their words mean; a bad row never costs a good one."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from darts_parallel.config import read_yaml
from darts_parallel.errors import ConfigError, DartsParallelError
from experiments.data import DATA

REQUIRED = ("layers", "hidden", "gpu", "n_gpus")
"""Columns without which a file is no table of runs; any other that is missing reads as empty."""
NUMBER = re.compile(
    r"[~≈ ]*([-+]?\d[\d_,]*\.?\d*(?:e[-+]?\d+)?)\s*([kmbt]?)(?![a-z0-9])", re.I | re.A
)
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MAX_LINES = 20
"""Lines of one record: a quote open for longer is taken for a mistake on its first line."""


Entry = dict[str, Any]
"""An entry of a table of `words.yaml`."""


class RowError(DartsParallelError):
    """A row that cannot be used; the message is the reason."""


@lru_cache(maxsize=1)
def word_tables() -> dict[str, Any]:
    """Read `words.yaml`."""
    return read_yaml(DATA / "words.yaml")


def first(table: str, text: str) -> Entry | None:
    """Return the first entry of a table whose words are in a text."""
    return next((entry for entry in word_tables()[table] if re.search(entry["words"], text)), None)


def frameworks() -> dict[str, Entry]:
    """Return the known training frameworks by name, the common one last; `words.yaml` says what they hold."""
    return {entry["name"]: entry for entry in word_tables()["frameworks"]}


@dataclass(frozen=True)
class TableRow:
    """One line of a file, as text."""

    file: str
    line: int
    """Line of the file on which the row begins; the header is line 1."""
    cells: dict[str, str] = field(repr=False)
    broken: str = ""
    """Reason why the line is no row of this schema; empty where it is."""

    def text(self, key: str) -> str:
        """Return the cell without surrounding blanks; empty where the column is missing."""
        return self.cells.get(key, "").strip()

    def words(self, *keys: str) -> str:
        """Join cells in lower case, for the search of words."""
        return " ".join(self.text(key) for key in keys).lower()

    def says(self, phrase: str) -> bool:
        """Tell whether the cells of one of the `phrases` of `words.yaml` match."""
        return self.matches(word_tables()["phrases"][phrase])

    def matches(self, patterns: dict[str, str]) -> bool:
        """Tell whether every pattern is in its cells, whose names blanks separate."""
        pairs = patterns.items()
        return all(re.search(pattern, self.words(*keys.split())) for keys, pattern in pairs)

    def one_of(self, key: str) -> str:
        """Return the value that `words.yaml` gives the words of a cell.

        Errors:
            RowError: they have none.
        """
        found = first(key, self.words(key))
        if found is None:
            known = ", ".join(dict.fromkeys(entry["value"] for entry in word_tables()[key]))
            raise RowError(f"{key}={self.text(key)} must be one of {known}")
        return str(found["value"])

    def number(self, key: str) -> float | None:
        """Read the number with which the cell begins (`~250k`, `2048.0`, `512?`, `4096 (assumed)`).

        None where it is empty or begins with words ("not stated").

        Errors:
            RowError: the number is not finite or not above zero.
        """
        found = NUMBER.match(self.text(key))
        if not found:
            if self.words(key) in {"nan", "inf", "-inf", "-nan"}:
                raise RowError(f"{key}={self.text(key)} must be a finite number")
            return None
        value = float(found[1].replace(",", "").replace("_", "")) * SCALE[found[2].lower()]
        if not 0 < value < 1e18:
            raise RowError(f"{key}={self.text(key)} must be above 0")
        return value

    def count(self, key: str) -> int | None:
        """Read a cell as a whole number; None where it is empty.

        Errors:
            RowError: the number is not whole.
        """
        value = self.number(key)
        if value is not None and value != round(value):
            raise RowError(f"{key}={self.text(key)} must be a whole number")
        return None if value is None else round(value)

    def require(self, key: str) -> int:
        """Read a whole number that nothing can stand in for.

        Errors:
            RowError: the cell holds no number.
        """
        value = self.count(key)
        if value is None:
            raise RowError(
                f"{key}={self.text(key)} is no number" if self.text(key) else f"{key} is missing"
            )
        return value


def read_tables(path: str) -> tuple[dict[str, list[TableRow]], list[tuple[str, str]]]:
    """Read all `*.csv` files of a folder, in the order of their names.

    Returns:
        The rows by file, and the files that are no tables of runs with the reason.

    Errors:
        ConfigError: the folder does not exist or holds no CSV file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"data={path} must be a folder; try one with CSV files of runs.")
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() == ".csv" and file.is_file()
    )
    if not files:
        raise ConfigError(f"data={path} must hold a CSV file; try a folder with one.")
    tables = {}
    others = []
    for file in files:
        try:
            tables[file.name] = _rows(file)
        except (RowError, OSError) as error:
            others.append((file.name, str(error)))
    return tables, others


def _rows(path: Path) -> list[TableRow]:
    """Read the rows of a file; a line that cannot be read is a broken row, the next is read on its own."""
    lines = (
        path.read_text(encoding="utf-8-sig", errors="replace").replace("\0", "\ufffd").splitlines()
    )
    header: list[str] = []
    rows = []
    index = 0
    while index < len(lines):
        line = index + 1
        cells, used = _record(lines, index, len(header))
        index += used
        if not header:
            header = _header(cells)
        elif cells is None:
            reason = "the line cannot be read (a quote is not closed)"
            rows.append(TableRow(path.name, line, {}, reason))
        elif any(cell.strip() for cell in cells):
            named = dict(zip(header, cells, strict=False))
            reason = f"{len(cells)} cells, but the header has {len(header)}"
            broken = "" if len(cells) == len(header) else reason
            rows.append(TableRow(path.name, line, named, broken))
    if not header:
        raise RowError("the file is empty")
    return rows


def _header(cells: list[str] | None) -> list[str]:
    """Read the names of columns; empty where the line is blank."""
    header = [cell.strip().lower() for cell in cells or ()]
    lacking = [key for key in REQUIRED if key not in header]
    if lacking and (cells is None or any(header)):
        raise RowError(f"not a table of runs: column {', '.join(lacking)} is missing")
    return header if any(header) else []


def _record(lines: list[str], start: int, width: int) -> tuple[list[str] | None, int]:
    """Split the record that begins on line `start`; None where no quote closes it. And its lines."""
    for used in range(1, min(MAX_LINES, len(lines) - start) + 1):
        try:
            records = list(csv.reader(["\n".join(lines[start : start + used])], strict=True))
        except csv.Error:
            continue
        cells = records[0] if records else []
        if used == 1 or len(cells) == width:
            return cells, used
    return None, 1


def usual(
    row: TableRow,
    siblings: Sequence[TableRow],
    key: str,
    like: str,
) -> int | None:
    """Return the number that rows with the same `like` give most often for `key` (ties: the smallest)."""
    found: Counter[int] = Counter()
    for other in siblings:
        if other.text(like) == row.text(like) and not other.broken:
            try:
                value = other.count(key)
            except RowError:
                continue
            found.update([value] if value else [])
    return min(found, key=lambda value: (-found[value], value)) if found else None


def framework_of(row: TableRow) -> Entry:
    """Return the framework that a row's words name, else the common one."""
    found = first("frameworks", row.words("source", "model", "notes", "zero")) or {}
    instead = "instead" in found and re.search(found["where_gpu"], row.words("gpu"))
    return frameworks()[found["instead"]] if instead else found
