"""Write pages of results: `experiments/results/NAME.md`, with command, commit, machine, date and limits."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from darts_parallel.plans import package_version, write_text

RESULTS = Path(__file__).parent / "results"


def publish(
    name: str,
    question: str,
    command: str,
    text: str,
    pictures: Mapping[Path, str] | None = None,
    folder: Path = RESULTS,
    limits: str = "",
) -> Path:
    """Write the page of an experiment and copy its pictures to `pictures/` next to it; returns the page.

    Args:
        pictures: Files to copy, each with its caption.
        limits: What the answer does not show, in a sentence.
    """
    shown = folder / "pictures"
    shown.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# {question}",
        "",
        f"    {command}",
        "",
        f"Commit {commit()}, {date.today().isoformat()}, {processor()}.",
        "",
        text.strip(),
    ]
    for source, caption in (pictures or {}).items():
        target = shown / f"{name}_{source.name}"
        shutil.copyfile(source, target)
        lines += ["", f"![{caption}](pictures/{target.name})"]
    lines += ["", f"Not shown: {limits}"] if limits else []
    page = folder / f"{name}.md"
    write_text(page, "\n".join(lines) + "\n")
    return page


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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} logical CPUs"
