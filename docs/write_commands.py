"""Write `docs/reference/commands.md` from the help of every command: `python docs/write_commands.py`."""

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "reference" / "commands.md"
COMMANDS = ("price", "explain", "tune", "graph", "design", "profile")
LISTS = ("models", "clusters", "devices", "trainers")
HEAD = """\
# Every command

`python docs/write_commands.py` writes this page from the help of the commands. [The keys](keys.md) are listed
apart, and `darts-parallel --help KEY` explains one.

Exit status is 0, or 2 with one sentence if something that you gave cannot be used.
"""


def help_of(*words: str) -> str:
    """Return the help that the command prints behind these words."""
    command = [sys.executable, "-m", "darts_parallel", *words, "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def page() -> str:
    """Return the text of the page."""
    parts = [f"{HEAD}\n## darts-parallel\n\n```text\n{help_of()}\n```\n"]
    parts += [f"## {name}\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS + LISTS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
