"""Which switches does a trainer's price assume, and which lines of its files set them?

    python -m experiments.trainer_switches

Every trainer's best uniform plan of Llama 3 70B on 64 H100 is priced and written under each value of
each switch. The plans of Megatron-LM and nanotron have tp 8, the one of DeepSpeed has no pipeline.
Llama 3 8B takes the place of a model of which a trainer has no plan. A line is shown where the files of
two values differ.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from darts_parallel import evaluate, load_problem, plan
from darts_parallel.config import NEWEST, read_trainer, run_main
from darts_parallel.errors import DartsParallelError, InfeasibleError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.report import markdown_table
from experiments.study import Study, StudyOptions, report_text, run_study

MODELS = ("llama3_70b", "llama3_8b")
SEARCH = ("cluster=h100_8x8", "space=uniform", "search=exact")
SPLIT = ("space.tp=8", "space.sequence_parallel=true")
PINNED = {"megatron": SPLIT, "nanotron": SPLIT, "deepspeed": ("space.pp=1",)}
"""Settings under which most switches count, by trainer."""


@dataclass(frozen=True)
class Row:
    """One value of one switch of a trainer's plan."""

    trainer: str
    plan: str
    switch: str
    seconds: float
    """Per iteration; 0 where the plan does not run under the value."""
    lines: str
    """Lines that only the files of this value have, or why there are no files."""


def read_trainer_rows(name: str) -> list[Row]:
    """Price and write the best plan of a trainer under every value of its switches."""
    problem, found = _best(name)
    words = f"{problem.config.model.name}: {found.describe(problem.training.global_batch_size)}"
    usual = _lines(problem, found, name)
    rows = []
    for key, values in read_trainer(name).switches.items():
        for value in () if "moe" in key else values:
            switch = f"{key}={str(value).lower()}"
            try:
                changed = problem.with_training(**{key: value})
                own = _lines(changed, found, name)
            except DartsParallelError as error:
                reason = str(error).partition(": ")[2].partition(";")[0]
                rows.append(Row(name, words, switch, 0.0, reason))
                continue
            others = usual if own != usual else _others(problem, found, name, key)
            only = [line.strip() for line in own if others and line not in others]
            seconds = evaluate(found, changed).iteration_time_s
            rows.append(Row(name, words, switch, seconds, " ".join(only) or "no line"))
    return rows


def _best(name: str) -> tuple[Problem, Plan]:
    """Return the job of the largest model of which a trainer has a plan, and the best plan."""
    for model in MODELS:
        pins = PINNED.get(name, ())
        problem = load_problem([f"model={model}", f"trainer={name}", *SEARCH, *pins])
        with suppress(InfeasibleError, UnsupportedError):
            return problem, plan(problem).plan
    raise UnsupportedError(
        f"trainer={name} has no plan of {' or '.join(MODELS)}; try another cluster."
    )


def _lines(problem: Problem, found: Plan, name: str) -> list[str]:
    """Return the lines of all files of a plan."""
    files = export_plan(problem, found, name).files
    return "\n".join(files.values()).splitlines()


def _others(problem: Problem, found: Plan, name: str, key: str) -> list[str]:
    """Return the lines of the last other value of a switch that the plan runs under."""
    _, *others = read_trainer(name).switches[key]
    for value in reversed(others):
        with suppress(DartsParallelError):
            return _lines(problem.with_training(**{key: value}), found, name)
    return []


def report(rows: Sequence[Row]) -> str:
    """List every value of every switch, with seconds and lines."""
    plans = dict.fromkeys(f"{row.trainer}: {row.plan}" for row in rows)
    cells = [
        (row.trainer, row.switch, f"{row.seconds:.2f}" if row.seconds else "", f"`{row.lines}`")
        for row in rows
    ]
    note = "The first value of a switch is what the trainer's files set without being asked."
    table = markdown_table(("trainer", "switch", "s", "lines of its files"), cells, left=(0, 1, 3))
    return report_text(note, "Plans: " + "; ".join(plans) + ".", table)


def run(options: StudyOptions) -> int:
    """Write the table; returns the exit status."""
    study = Study(
        "trainer_switches",
        "Which switches does a trainer's price assume, and which lines of its files set them?",
        "that the trainers run as fast as priced; the lines were compared with their sources.",
        read_trainer_rows,
        report,
    )
    return run_study(study, {name: name for name in NEWEST}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.trainer_switches", run))
