"""Rows of a folder of CSV files as text, read one by one: a bad row never costs a good one."""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from darts_parallel.errors import ConfigError, DartsParallelError

REQUIRED = ("layers", "hidden", "gpu", "n_gpus")
"""Columns without which a file is no table of runs; any other that is missing reads as empty."""
NUMBER = re.compile(
    r"^[~≈ ]*([-+]?[0-9][0-9_,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*([kKmMbBtT]?)(?![A-Za-z0-9])"
)
SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
MAX_LINES = 20
"""Lines of one record: a quote open for longer is taken for a mistake on its first line."""


class RowError(DartsParallelError):
    """A row that cannot be used; the message is the reason."""


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

    def number(self, key: str) -> float | None:
        """Read the number with which the cell begins (`~250k`, `2048.0`, `512?`, `4096 (assumed)`).

        None where it is empty or begins with words ("not stated").

        Errors:
            RowError: the number is not finite or not above zero.
        """
        found = NUMBER.match(self.text(key))
        if not found:
            if self.text(key).lower() in {"nan", "inf", "-inf", "-nan"}:
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
            raise RowError(f"{key}={self.text(key)} is no number" if self.text(key) else f"{key} is missing")
        return value


def read_tables(path: str) -> tuple[list[TableRow], list[tuple[str, str]]]:
    """Read all `*.csv` files of a folder, in the order of their names.

    Returns:
        All rows, and the files that are not of this schema with the reason.

    Errors:
        ConfigError: the folder does not exist or holds no CSV file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"data={path} must be a folder; try one with CSV files of runs.")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".csv" and file.is_file())
    if not files:
        raise ConfigError(f"data={path} must hold a CSV file; try a folder with one.")
    rows: list[TableRow] = []
    others: list[tuple[str, str]] = []
    for file in files:
        try:
            rows.extend(_read_file(file))
        except (RowError, OSError) as error:
            others.append((file.name, str(error)))
    return rows, others


def _read_file(path: Path) -> list[TableRow]:
    """Read the rows of a file; a line that cannot be read is a broken row, the next is read on its own."""
    lines = path.read_text(encoding="utf-8-sig", errors="replace").replace("\0", "\ufffd").splitlines()
    header: list[str] = []
    rows: list[TableRow] = []
    index = 0
    while index < len(lines):
        cells, used = _record(lines, index, len(header))
        line, index = index + 1, index + used
        if cells is not None and not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = [cell.strip().lower() for cell in cells or []]
            lacking = [key for key in REQUIRED if key not in header]
            if lacking:
                raise RowError(f"not a table of runs: column {', '.join(lacking)} is missing")
        elif cells is None:
            rows.append(TableRow(path.name, line, {}, "the line cannot be read (a quote is not closed)"))
        else:
            wrong = len(cells) != len(header)
            broken = f"{len(cells)} cells, but the header has {len(header)}" if wrong else ""
            rows.append(TableRow(path.name, line, dict(zip(header, cells, strict=False)), broken))
    if not header:
        raise RowError("the file is empty")
    return rows


def _record(lines: list[str], first: int, width: int) -> tuple[list[str] | None, int]:
    """Split the record that begins on line `first`; None where no quote closes it. And its lines."""
    for used in range(1, min(MAX_LINES, len(lines) - first) + 1):
        try:
            records = list(csv.reader(["\n".join(lines[first : first + used])], strict=True))
        except csv.Error:
            continue
        cells = records[0] if records else []
        if used == 1 or len(cells) == width:
            return cells, used
    return None, 1
