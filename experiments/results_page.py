"""Write pages of results: `experiments/results/NAME.md`, with command, commit, machine, date and limits."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from darts_parallel.errors import package_version
from darts_parallel.plans import write_text

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Page:
    """Hold what a page says: question, command, answer, and what the answer does not show."""

    name: str
    question: str
    command: str
    text: str
    limits: str
    """Sentence on what the answer does not show."""


def publish(page: Page) -> Path:
    """Write a page; returns the file."""
    run = f"Commit {commit()}, {date.today().isoformat()}, {processor()}."
    text = page.text.strip()
    parts = (f"# {page.question}", f"    {page.command}", run, text, f"Not shown: {page.limits}")
    file = RESULTS / f"{page.name}.md"
    write_text(file, "\n\n".join(parts) + "\n")
    return file


def typed_command(module: str) -> str:
    """Return the command line that started this process, as a shell takes it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def commit() -> str:
    """Name the state of the code: the commit of the checkout, or the installed version."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
        )
    except OSError:
        return package_version()
    return done.stdout.strip() or package_version()


def processor() -> str:
    """Name and number of the CPUs, as the system tells it."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"model name\s*: (.*)", text)
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} logical CPUs"
