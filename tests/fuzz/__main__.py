"""Does anything break, and is every claim true? Random problems, bad values and killed processes.

    make fuzz      # 200 problems, 300 bad values, 100 spoilt files, all splits of operators, 3 kills
    make fuzz ARGS="--problems 1000 --inputs 0 --kills 0 --seed 7"

Random tiny problems are solved by the exact methods and by an enumeration that shares no code with them
(`tests/fuzz/oracle.py`): claimed seconds, "optimal" and "infeasible" must agree. Every key of the schema gets
bad values, words and files of other commands are spoilt: each must end in one sentence or in a result.
Every split that a rule of `darts-parallel graph` offers is run on two processes, forward and backward.
Processes are killed, interrupted, and run without room or folder. Ctrl-C ends with the table so far; the
exit status is 1 where anything is wrong.
"""

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from darts_parallel.report.tables import markdown_table
from experiments.results_page import Page, publish
from tests.fuzz import files, inputs, problems, processes, splits
from tests.fuzz.case import GOOD, FuzzCase, FuzzOutcome

SIZES = {
    "problems": 200,
    "inputs": 300,
    "files": 100,
    "splits": 300,
    "kills": 3,
    "limit": 300,
    "seed": 0,
}
"""Default of every option; `limit`: plans of a random problem at most."""


class StopFuzzing(BaseException):
    """Raise on Ctrl-C: no KeyboardInterrupt, which a search answers with its best plan so far."""


def stop(number: int, frame: Any) -> None:
    """Handle SIGINT and SIGTERM."""
    raise StopFuzzing


def cases(sizes: argparse.Namespace) -> Iterator[FuzzCase]:
    """Yield all cases, the cheap ones first."""
    yield from inputs.cases(sizes.inputs, sizes.seed)
    yield from files.cases(sizes.files, sizes.seed)
    yield from splits.cases(sizes.splits, sizes.seed)
    if sizes.kills:
        yield from processes.cases(sizes.kills, sizes.seed)
    yield from problems.cases(sizes.problems, sizes.seed, sizes.limit)


def table(found: Sequence[tuple[str, FuzzOutcome]]) -> list[str]:
    """Return a row for each kind of case."""
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in found):
        outcomes = [outcome for other, outcome in found if other == kind]
        counts = Counter(outcome.outcome for outcome in outcomes)
        words = [f"{counts[good]:,} {good}" for good in GOOD if counts[good]]
        plans = sum(outcome.plans for outcome in outcomes)
        words += [f"{plans:,} plans enumerated"] if plans else []
        wrong = sum(outcome.outcome not in GOOD for outcome in outcomes)
        lines.append([kind, f"{len(outcomes):,}", str(wrong), ", ".join(words)])
    return markdown_table(["cases", "run", "wrong", "of the others"], lines, (0, 3))


def main(arguments: Sequence[str]) -> int:
    """Run all cases, print the table and every wrong one; return the exit status."""
    parser = argparse.ArgumentParser("make fuzz")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--publish", action="store_true", help="write experiments/results/robustness.md"
    )
    sizes = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: list[tuple[str, FuzzOutcome]] = []
    lines = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        for kind, run in cases(sizes):
            found.append((kind, run()))
            if (last := found[-1][1]).outcome not in GOOD:
                lines.append(f"- `{' '.join(f'{last.subject}: {last.outcome}'.split())}`")
                print(lines[-1], file=sys.stderr, flush=True)
    except StopFuzzing:
        lines.append("- stopped before its end: the table counts what was run")
    text = "\n".join([*table(found), "", *(lines or ["Nothing was wrong."])])
    print(text)
    if sizes.publish:
        given = " ".join(f"--{name} {getattr(sizes, name)}" for name in SIZES)
        limits = "problems that are too large to enumerate."
        command = f'make fuzz ARGS="{given}"'
        question = "Does anything break, and is every claim true?"
        publish(Page("robustness", question, command, text, limits=limits))
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
