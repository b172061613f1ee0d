"""Size and density of source code, in tokens.

`python -m tests.support.code_size [FOLDER ...]` prints a table of packages and every place that breaks a
limit of `tests/test_budget.py` in these folders.
"""

import ast
import io
import sys
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from radon.complexity import cc_visit

from tests.support.sources import ROOT

PRODUCT = ("darts_parallel", "baselines", "experiments", "clients")
"""Folders that share one budget of tokens."""
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}
"""Tokens that say how code is laid out, not what it does."""
DATA_NODES = (
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.Name,
    ast.Attribute,
    ast.UnaryOp,
    ast.USub,
    ast.Starred,
    ast.keyword,
    ast.expr_context,
)
"""Nodes of a table of data next to records: literals and names, no functions, no arithmetic."""
Place = tuple[int, int]
MAX_STATEMENT = 40
"""Tokens of a statement outside tables of data; of a compound statement the header counts."""
COMPLEX = 11
"""Cyclomatic complexity, as radon counts it, from which a function is called complex."""


@dataclass(frozen=True)
class Size:
    """Size of source files."""

    tokens: int = 0
    code_lines: int = 0
    """Lines that hold at least one token."""
    statements: int = 0
    skips: int = 0
    """Comments that switch the formatter off."""

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.tokens + other.tokens,
            self.code_lines + other.code_lines,
            self.statements + other.statements,
            self.skips + other.skips,
        )

    @property
    def tokens_per_line(self) -> float:
        """Tokens of an average line of code."""
        return self.tokens / max(self.code_lines, 1)

    @property
    def tokens_per_statement(self) -> float:
        """Tokens of an average statement."""
        return self.tokens / max(self.statements, 1)


def is_prose(node: ast.AST) -> bool:
    """Return whether a statement is a string that stands alone, such as a docstring."""
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def counted_statements(tree: ast.AST) -> list[ast.stmt]:
    """List the statements of a file without imports and docstrings."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, (ast.Import, ast.ImportFrom))
        and not is_prose(node)
    ]


def counted_tokens(text: str, tree: ast.AST) -> list[tokenize.TokenInfo]:
    """List the tokens of a file without layout, comments, imports and docstrings."""
    ignored: set[int] = set()
    for node in ast.walk(tree):
        if is_prose(node) or isinstance(node, (ast.Import, ast.ImportFrom)):
            ignored.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    every = tokenize.generate_tokens(io.StringIO(text).readline)
    return [t for t in every if t.type not in LAYOUT and t.start[0] not in ignored]


@cache
def parsed(text: str) -> tuple[ast.Module, list[tokenize.TokenInfo]]:
    """Return the tree and the counted tokens of a source text; several tests ask for them."""
    tree = ast.parse(text)
    return tree, counted_tokens(text, tree)


def size_of(text: str) -> Size:
    """Measure one source text."""
    tree, tokens = parsed(text)
    lines = {token.start[0] for token in tokens}
    skips = text.count("fmt: skip") + text.count("fmt: off")
    return Size(len(tokens), len(lines), len(counted_statements(tree)), skips)


def is_table_of_data(statement: ast.stmt) -> bool:
    """Return whether a statement assigns literals and names alone."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return False
    return all(is_data(node) for node in ast.walk(statement.value))


def is_data(node: ast.AST) -> bool:
    """Return whether a node may stand in a table of data: a literal, a name, or a record of them."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id.lstrip("_")[:1].isupper()
    return isinstance(node, DATA_NODES)


def statement_tokens(statement: ast.stmt, starts: list[Place], ends: list[Place]) -> int:
    """Count the tokens of a statement; of a compound one those before its body.

    Args:
        starts: Line and column at which each token of the file starts, in order.
        ends: And ends.
    """
    start = (statement.lineno, statement.col_offset)
    end = (statement.end_lineno or 0, statement.end_col_offset or 0)
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if isinstance(body, list):
        end = (getattr(body[0], "lineno", body[0]), getattr(body[0], "col_offset", 0))
    return bisect_right(ends, end) - bisect_left(starts, start)


def long_statements(text: str) -> list[tuple[int, int]]:
    """List (line, tokens) of statements above `MAX_STATEMENT` that are no tables of data."""
    tree, tokens = parsed(text)
    starts = [token.start for token in tokens]
    ends = [token.end for token in tokens]
    found = []
    for statement in counted_statements(tree):
        if is_table_of_data(statement):
            continue
        count = statement_tokens(statement, starts, ends)
        if count > MAX_STATEMENT:
            found.append((statement.lineno, count))
    return sorted(found)


def complex_functions(text: str) -> list[tuple[int, str, int]]:
    """List (line, name, complexity) of complex functions."""
    blocks = [block for block in cc_visit(text) if not hasattr(block, "methods")]
    return [(b.lineno, b.fullname, b.complexity) for b in blocks if b.complexity >= COMPLEX]


def package_of(path: Path) -> str:
    """Name the package of a file: `darts_parallel/cost`, `experiments`, `tests`."""
    first, *rest = path.relative_to(ROOT).parts
    return f"{first}/{rest[0]}" if first == "darts_parallel" and len(rest) > 1 else first


def files_of(folders: tuple[str, ...]) -> Iterator[Path]:
    """Yield the source files of folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def sizes_by_package(folders: tuple[str, ...]) -> dict[str, Size]:
    """Measure every package of the folders."""
    sizes: dict[str, Size] = {}
    for path in files_of(folders):
        package = package_of(path)
        sizes[package] = sizes.get(package, Size()) + size_of(path.read_text(encoding="utf-8"))
    return sizes


def table(sizes: dict[str, Size]) -> str:
    """Print sizes by package and in sum."""
    rows = [f"{'package':26}{'tokens':>9}{'code':>8}{'a line':>8}{'a statement':>13}{'skips':>7}"]
    for name, size in [*sizes.items(), ("sum", sum(sizes.values(), Size()))]:
        rows.append(
            f"{name:26}{size.tokens:9,}{size.code_lines:8,}{size.tokens_per_line:8.2f}"
            f"{size.tokens_per_statement:13.2f}{size.skips:7}"
        )
    return "\n".join(rows)


def main(folders: tuple[str, ...]) -> None:
    """Print the table and the places that break a limit."""
    print(table(sizes_by_package(folders)))
    statements = functions = 0
    for path in files_of(folders):
        text = path.read_text(encoding="utf-8")
        for line, count in long_statements(text):
            statements += 1
            print(f"{path.relative_to(ROOT)}:{line}: statement of {count} tokens")
        for line, name, complexity in complex_functions(text):
            functions += 1
            print(f"{path.relative_to(ROOT)}:{line}: {name} has complexity {complexity}")
    print(f"{statements} long statements, {functions} complex functions")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or PRODUCT)
