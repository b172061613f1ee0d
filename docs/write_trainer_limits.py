"""Write `docs/reference/trainer-limits.md` from `conf/trainer`: `python docs/write_trainer_limits.py`."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "reference" / "trainer-limits.md"
HEAD = """\
# What each trainer cannot run

`python docs/write_trainer_limits.py` writes this page from `conf/trainer`. With `trainer=NAME` the search
leaves these combinations out. A plan or a job that has one is refused in a sentence with the reason.

A row holds if all of its settings hold together. *Search instead* is the nearest space, or job, without
the combination.
"""
COLUMNS = """\
| settings | reason | search instead |
| --- | --- | --- |
"""
COUNTS = {"many": "above 1", "some": "above 0"}


def values(given: Any) -> str:
    """Return the values of a setting in words."""
    if isinstance(given, str):
        return COUNTS[given]
    return " or ".join("null" if one is None else str(one).lower() for one in given)


def row(lack: dict[str, Any]) -> str:
    """Return the line of a combination."""
    settings = ", ".join(f"`{key}` {values(given)}" for key, given in lack["when"].items())
    why = lack["why"].removeprefix("and ")
    return f"| {settings} | {why} | `{lack['instead']}` |"


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for path in sorted((ROOT / "conf" / "trainer").glob("*.yaml")):
        lacks = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"].get("lacks", [])
        if lacks:
            table = "\n".join(map(row, lacks))
            parts.append(f"## {path.stem}\n\n{COLUMNS}{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
