"""The budget: how many lines of source the project may have, counted file by file.

A feature that does not fit takes the lines of another. Every line counts, blank ones and docstrings too, in
every file of source of the checkout, whatever its folder; long lines do not help, since none is allowed.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUDGET, TEST_BUDGET = 39_000, 15_500
"""Lines of everything but `tests/`, and of `tests/`, without what `GRANTS` adds."""
GRANTS = {
    "graph: operators of any module": (2_600, 1_000),
    "design: the best use of a budget": (1_200, 300),
    "order of passes": (600, 300),
    "truth of the cost model, its answers, robustness": (1_600, 900),
}
"""Lines of code and of tests that features may add, by name: 45,000 and 18,000 in sum."""
SOURCES = {".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".h", ".js", ".jinja", ".j2", ".tmpl"}
LONGEST = 130
"""Characters of a line with the remarks for tools that ruff allows beyond its 110."""
MADE = {"build", "dist", "outputs", "multirun", "__pycache__"}
"""Folders that commands write, which git ignores as it does those that begin with a point."""


def sources(folder: Path) -> Iterator[Path]:
    """Yield the source files below a folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in MADE and not path.name.startswith("."):
            yield from sources(path)
        elif path.suffix in SOURCES:
            yield path


def counted(root: Path) -> Counter[str]:
    """Count lines by package: `darts_parallel/plan`, `experiments`, `tests/plan`."""
    lines: Counter[str] = Counter()
    for path in sources(root):
        *folders, _ = path.relative_to(root).parts
        lines["/".join(folders[:2]) or "."] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def table(lines: Counter[str], limit: int) -> str:
    """Print the packages, the longest first, below the sum and its limit."""
    rows = [f"{sum(lines.values()):7,} of {limit:,} lines, too many: delete what a feature no longer needs"]
    return "\n".join(rows + [f"{count:7,} {package}" for package, count in lines.most_common()])


@pytest.mark.parametrize(("tests", "budget"), [(False, BUDGET), (True, TEST_BUDGET)])
def test_the_project_keeps_its_budget_of_lines(tests: bool, budget: int) -> None:
    every, limit = counted(ROOT), budget + sum(lines[tests] for lines in GRANTS.values())
    lines = Counter({name: n for name, n in every.items() if (name.split("/")[0] == "tests") == tests})
    if sum(lines.values()) > limit:
        pytest.fail(table(lines, limit), pytrace=False)


def test_no_line_is_long() -> None:
    for path in sources(ROOT):
        long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > LONGEST]
        assert not long, (path, long)


def test_lines_of_any_folder_count(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "pkg/deep/er/c.pyi", "build/d.py", ".venv/e.py", "pkg/data.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Text."""\n\n# comment\n')
    assert counted(tmp_path) == {".": 3, "pkg": 3, "pkg/deep": 3}
    assert table(counted(tmp_path), 8).startswith("      9 of 8 lines, too many")
