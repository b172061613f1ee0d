"""Tables of rows that are known beforehand: Markdown, CSV and the terminal's, each made in one call."""

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

from rich.markup import escape
from rich.table import Table

from darts_parallel.report.format import table_of


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> list[str]:
    """Return lines of a Markdown table; columns `left` to the left, the others (numbers) to the right."""
    rule = ["---" if index in left else "---:" for index in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def filled_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[int] = (0,),
) -> Table:
    """Return a table for the terminal; headers of numbers have a word a line."""
    numbers = [name.replace(" ", "\n") for name in header]
    columns = (name if i in left else f"{numbers[i]}>" for i, name in enumerate(header))
    table = table_of(title, *columns)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the text of a CSV file: a line of names, then one a row."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def csv_of(kind: type[Any], rows: Iterable[Any], *, without: Collection[str] = ()) -> str:
    """Return the CSV of instances of a dataclass: all its fields but `without`."""
    names = [field.name for field in fields(kind) if field.name not in without]
    return csv_text(names, ([getattr(row, name) for name in names] for row in rows))
