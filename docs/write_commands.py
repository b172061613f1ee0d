"""Write `docs/reference/commands.md` from the help of every command: `python docs/write_commands.py`."""

import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from darts_parallel.cli import main

PAGE = Path(__file__).parent / "reference" / "commands.md"
COMMANDS = ("price", "explain", "tune", "graph", "design", "profile")
LISTS = ("models", "clusters", "devices", "trainers")
HEAD = """\
# Every command

`python docs/write_commands.py` writes this page from the help of the commands. [The keys](keys.md) are listed
apart, and `darts-parallel --help KEY` explains one.

Exit status is 0, or 2 with one sentence if something that you gave cannot be used
([all statuses](../start/errors.md#exit-status-for-scripts)).
"""


def help_of(*words: str) -> str:
    """Return the help that the command prints behind these words."""
    given = sys.argv
    sys.argv = ["darts-parallel", *words, "--help"]
    said = StringIO()
    try:
        with redirect_stdout(said), suppress(SystemExit):
            main()
    finally:
        sys.argv = given
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def page() -> str:
    """Return the text of the page."""
    parts = [f"{HEAD}\n## darts-parallel\n\n```text\n{help_of()}\n```\n"]
    parts += [f"## {name}\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS + LISTS]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
