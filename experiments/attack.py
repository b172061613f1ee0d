"""Does anything break, and is every claim true? An attack on the commands by random problems and bad input.

    python -m experiments.attack                        # 200 problems, 300 inputs, 150 options, 8 kills
    python -m experiments.attack problems=10000 log=outputs/attack.jsonl      # goes on where it was stopped

Random tiny problems are solved by the command's exact methods and by an enumeration that shares no code with
them (`experiments/robustness/oracle.py`): claimed seconds, "optimal" and "infeasible" must agree. Every key
of the schema gets bad values: each must end in one sentence or in a plan, without a warning, within 20 s.
Every option of every experiment gets one: a refused one leaves no file behind, a running one ends in a
sentence at Ctrl-C. Processes are killed, interrupted, and run without room, folder, rights or reader.
Ctrl-C or SIGTERM ends the attack with the table of what was tried.
"""

import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from darts_parallel.config.checks import require_at_least, require_within
from darts_parallel.config.options import run_main
from darts_parallel.report.tables import markdown_table
from experiments.results_page import publish
from experiments.robustness import experiment_options, inputs, problems, processes
from experiments.robustness.verdict import GOOD, Log, Try, Verdict

SHOWN = 20
"""Wrong answers that are listed."""


class _Stopped(BaseException):
    """The user has seen enough; no KeyboardInterrupt, which a search answers with its best plan so far."""


def _stop(number: int, frame: Any) -> None:
    raise _Stopped


@dataclass
class AttackOptions:
    """How much of everything."""

    problems: int = 200
    """Random problems that the oracle can enumerate."""
    limit: int = 300
    """Plans that such a problem may have."""
    inputs: int = 300
    """Bad values of keys, at least one for every key; 0: none."""
    options: int = 150
    """Bad values of experiments' options, at least one for every option; 0: none."""
    kills: int = 8
    """SIGKILLs, and as many Ctrl-Cs; 0: no process is troubled."""
    seed: int = 0
    log: str = ""
    """A file of verdicts, so that a stopped attack goes on; empty: none."""
    publish: bool = False
    """Write experiments/results/robustness.md, too."""

    def __post_init__(self) -> None:
        for key in ("problems", "inputs", "options", "kills"):
            require_within(key, getattr(self, key), 0, 10**6)
        require_within("limit", self.limit, 1, 10**7)
        require_at_least("seed", self.seed, 0)


def tries(options: AttackOptions) -> Iterator[Try]:
    """All tries of an attack, the cheap ones first."""
    if options.inputs:
        yield from inputs.tries(options.inputs, options.seed)
    if options.kills:
        yield from processes.tries(options.kills, options.seed)
    if options.options:
        yield from experiment_options.tries(options.options, options.seed)
    yield from problems.tries(options.problems, options.seed, options.limit)


def run(options: AttackOptions) -> int:
    """Attack, print the tables; the exit status is 1 where anything is wrong."""
    torch.set_num_threads(1)  # tiny tensors
    log, found, stopped = Log(options.log), list[tuple[Try, Verdict]](), False
    before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for wanted in tries(options):
            found.append((wanted, log.verdict(wanted)))
            if found[-1][1].wrong:
                print(_line(found[-1][1]), file=sys.stderr, flush=True)
    except _Stopped:
        stopped = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    lines = [*_table(found, log), "", *_list([verdict for _, verdict in found if verdict.wrong])]
    if stopped:
        lines += ["", "Stopped before its end: the table counts what was tried."]
    text = "\n".join(lines)
    print(text)
    if options.publish:
        names = ("problems", "limit", "inputs", "options", "kills", "seed")
        given = " ".join(f"{name}={getattr(options, name)}" for name in names)
        command = f"python -m experiments.attack {given} publish=true"
        publish("robustness", "Does anything break, and is every claim true?", command, text)
    return int(any(verdict.wrong for _, verdict in found))


def _table(found: Sequence[tuple[Try, Verdict]], log: Log) -> list[str]:
    mended = bool(log.once_wrong)
    header = ["attack", "tried", "wrong", *(["once wrong, mended"] if mended else []), "of the others"]
    lines = []
    for kind in dict.fromkeys(wanted.kind for wanted, _ in found):
        mine = [(wanted, verdict) for wanted, verdict in found if wanted.kind == kind]
        wrong = sum(verdict.wrong for _, verdict in mine)
        counts = Counter(verdict.outcome for _, verdict in mine if not verdict.wrong)
        words = [f"{counts[outcome]:,} {outcome}" for outcome in GOOD if counts[outcome]]
        plans = sum(verdict.plans for _, verdict in mine)
        words += [f"{plans:,} plans enumerated"] if plans else []
        once = sum((wanted.kind, wanted.name) in log.once_wrong for wanted, _ in mine) - wrong
        lines.append([kind, f"{len(mine):,}", str(wrong), *([str(once)] if mended else []), ", ".join(words)])
    return markdown_table(header, lines, (0, len(header) - 1))


def _list(wrong: Sequence[Verdict]) -> list[str]:
    if not wrong:
        return ["Nothing was wrong."]
    more = [f"- ... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    return ["Wrong:", "", *(f"- `{_line(verdict)}`" for verdict in wrong[:SHOWN]), *more]


def _line(verdict: Verdict) -> str:
    return " ".join(f"{verdict.subject}: {verdict.outcome}".split())


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.attack", __doc__, AttackOptions, run))
