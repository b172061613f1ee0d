"""Does anything break, and is every claim true? An attack on the command by random problems and bad input.

    python -m experiments.attack                        # 200 problems, 300 inputs, 8 kills: about 10 minutes
    python -m experiments.attack problems=10000 inputs=0 kills=0

Random tiny problems are solved by the command's exact methods and by an enumeration that shares no code with
them (`experiments/robustness/oracle.py`): claimed seconds, "optimal" and "infeasible" must agree. Every key
of the schema gets bad values: each must end in one sentence or in a plan, without a warning, within 20 s.
Processes are killed, and run without room, without a folder and without a reader.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from darts_parallel.config.checks import require_at_least, require_within
from experiments.options import run_main
from experiments.results_page import publish
from experiments.robustness import inputs, problems, processes

SHOWN = 20
"""Wrong answers that are listed."""


@dataclass
class AttackOptions:
    """How much of everything."""

    problems: int = 200
    """Random problems that the oracle can enumerate."""
    limit: int = 3000
    """Plans that such a problem may have."""
    inputs: int = 300
    """Bad values, at least one for every key."""
    kills: int = 8
    seed: int = 0
    publish: bool = False
    """Write experiments/results/robustness.md, too."""

    def __post_init__(self) -> None:
        for key in ("problems", "inputs", "kills"):
            require_within(key, getattr(self, key), 0, 10**6)
        require_within("limit", self.limit, 1, 10**7)
        require_at_least("seed", self.seed, 0)


def run(options: AttackOptions) -> int:
    """Attack, print the tables; the exit status is 1 where anything is wrong."""
    rows: list[tuple[str, int, int, str]] = []
    wrong: list[str] = []
    if options.problems:
        found = problems.attack(options.problems, options.seed, options.limit)
        counts = Counter(verdict.outcome for verdict in found if not verdict.wrong)
        plans = sum(verdict.plans for verdict in found)
        words = f"{counts['agreed']} agree, {counts['refused']} refused; {plans:,} plans enumerated"
        rows.append(("random problems", len(found), sum(verdict.wrong for verdict in found), words))
        wrong += [f"{' '.join(v.overrides)}: {v.outcome}" for v in found if v.wrong]
    if options.inputs:
        answers = inputs.attack(options.inputs, options.seed)
        counts = Counter(answer.outcome for answer in answers if not answer.wrong)
        words = f"{counts['refused']} refused in a sentence, {counts['accepted']} accepted with a plan"
        rows.append(("bad inputs", len(answers), sum(answer.wrong for answer in answers), words))
        wrong += [f"{answer.override}: {answer.outcome}" for answer in answers if answer.wrong]
    if options.kills:
        for name, endings in (
            ("SIGKILL", processes.killed(options.kills, options.seed)),
            ("no room, folder or reader", processes.cramped()),
        ):
            rows.append((name, len(endings), sum(ending.wrong for ending in endings), ""))
            wrong += [f"{ending.difficulty}: {ending.outcome}" for ending in endings if ending.wrong]
    text = "\n".join([*_table(rows), "", *_list(wrong)])
    print(text)
    if options.publish:
        given = " ".join(f"{key}={getattr(options, key)}" for key in ("problems", "inputs", "kills", "seed"))
        command = f"python -m experiments.attack {given} publish=true"
        publish("robustness", "Does anything break, and is every claim true?", command, text)
    return int(bool(wrong))


def _table(rows: Sequence[tuple[str, int, int, str]]) -> list[str]:
    lines = ["| attack | tried | wrong | of the others |", "| --- | ---: | ---: | --- |"]
    return lines + [f"| {name} | {tried:,} | {wrong} | {words} |" for name, tried, wrong, words in rows]


def _list(wrong: Sequence[str]) -> list[str]:
    if not wrong:
        return ["Nothing was wrong."]
    more = [f"- ... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
    return ["Wrong:", "", *(f"- `{' '.join(line.split())}`" for line in wrong[:SHOWN]), *more]


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.attack", __doc__, AttackOptions, run))
