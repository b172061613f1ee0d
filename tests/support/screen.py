"""Lines of the command on 100 columns; `python -m tests.support.screen` writes report.md."""

import re
import tempfile
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from darts_parallel import load_problem
from darts_parallel.cli._job import Job
from tests.support.sources import ROOT

WIDTH = 100
FOLDER = "outputs/DATE/TIME"
REPORT = ROOT / "docs" / "start" / "report.md"


def printed(overrides: list[str], folder: Path) -> list[str]:
    """Lines of the whole command, without seconds of wall-clock; longer ones wrap.

    A busy machine changes nothing: limits of wall-clock are far away.
    """
    out = StringIO()
    job = Job(load_problem(overrides), folder, Console(file=out, width=WIDTH))
    planner = "darts_parallel.planner.memory_chance.RUNG_SECONDS"
    with patch(planner, 600.0), patch("darts_parallel.cli._trainers.SECONDS", 600.0):
        job.run()
    text = re.sub(r"( %; )[0-9.]+ s\b", r"\1… s", out.getvalue().replace(str(folder), FOLDER))
    lines = [line.rstrip() for line in text.splitlines()]
    return [line[i : i + WIDTH] for line in lines for i in range(0, max(len(line), 1), WIDTH)]


def default_lines(folder: Path) -> list[str]:
    """Lines of the default command."""
    return printed(["output.tensorboard=false", "search.max_seconds=1000"], folder)


def report_page(lines: list[str]) -> str:
    """Text of `docs/start/report.md` with the lines of the default command in its blocks."""
    stage = next(i for i, line in enumerate(lines) if line.startswith("stage "))
    causes = next(line for line in lines if " compute · " in line)
    checks = next(i for i, line in enumerate(lines) if line.startswith("exhaustive "))
    parts = [lines, lines[stage : stage + 3], [causes], lines[checks : checks + 3]]
    text = REPORT.read_text(encoding="utf-8")
    blocks = re.findall(r"(?<=```text\n).*?(?=\n```)", text, re.DOTALL)
    for old, new in zip(blocks[: len(parts)], parts, strict=True):
        text = text.replace(old, "\n".join(new))
    return text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        shown = default_lines(Path(place))
    REPORT.write_text(report_page(shown), encoding="utf-8")
