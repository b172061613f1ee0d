"""The project's own Python sources, each parsed once."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("darts_parallel", "baselines", "experiments", "clients", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


@cache
def nodes_of(text: str) -> list[ast.AST]:
    """List the nodes of a source in the order of `ast.walk`, its module first."""
    return list(ast.walk(ast.parse(text)))


def nodes(file: Path) -> list[ast.AST]:
    """List the nodes of a file's source."""
    return nodes_of(file.read_text())
