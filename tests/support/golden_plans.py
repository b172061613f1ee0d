"""Golden commands: `python -m tests.support.golden_plans [--write] [NAME ...]` runs and compares them.

Plan and predicted seconds of every row of `golden/plans.csv`; `--write` records what the commands find.
"""

import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden" / "plans.csv"
PLAN = (
    "pp",
    "cp",
    "virtual_stages",
    "schedule",
    "num_micro_batches",
    "stages",
    "layers",
    "placement",
    "order",
)
Row = dict[str, str]


def golden_rows() -> dict[str, Row]:
    """Read the recorded rows by name."""
    with GOLDEN.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def recorded(name: str, arguments: str, data: dict[str, Any]) -> Row:
    """Return the row of a command, from the content of its `plan.json`."""
    text = json.dumps({key: data.get(key) for key in PLAN}, sort_keys=True)
    # shares of offloading end at other last digits where sums have another order
    plan = json.dumps(json.loads(text, parse_float=lambda share: round(float(share), 9))).encode()
    known = {key: value for key, value in data["parallelism"].items() if value not in (None, 1)}
    return {
        "name": name,
        "arguments": arguments,
        "degrees": " ".join(f"{k} {v}" for k, v in known.items()),
        "plan": hashlib.sha256(plan).hexdigest()[:16],
        "seconds": repr(data["predicted"]["iteration_time_s"]),
    }


def agree(found: Row, known: Row) -> bool:
    """Return whether plans are equal, and their seconds to 1e-9."""
    seconds, before = float(found["seconds"]), float(known["seconds"])
    return found["plan"] == known["plan"] and abs(seconds - before) <= 1e-9 * before


def run(name: str, arguments: str) -> Row:
    """Run one command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "darts_parallel",
            *arguments.split(),
            f"hydra.run.dir={folder}/run",
        ]
        subprocess.run(command, check=True, capture_output=True)
        return recorded(
            name, arguments, json.loads((Path(folder) / "run" / "plan.json").read_text())
        )


def main(arguments: list[str]) -> int:
    """Run the named commands, or all; return how many differ from what is recorded."""
    known, differ = golden_rows(), 0
    for name in [one for one in arguments if one != "--write"] or list(known):
        found = run(name, known[name]["arguments"])
        same = agree(found, known[name])
        differ, known[name] = differ + (not same), found if "--write" in arguments else known[name]
        print(name, "same" if same else f"differs: {found} instead of {known[name]}", flush=True)
    if "--write" in arguments:
        with GOLDEN.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(next(iter(known.values()))), lineterminator="\n")
            writer.writeheader()
            writer.writerows(known.values())
    return differ


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
