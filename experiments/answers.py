"""Plan jobs for every trainer, as the command does it, and show what an engineer would sign.

    python -m experiments.answers                                     # 12 jobs x 7 trainers, some 15 minutes

Every row is one run of `darts-parallel … trainer=NAME` with its defaults (`space.out_of_memory=0.2`), read
from its plan.json: seconds, the chance that the whole job fits, and the same trainer's best uniform plan. A
pair without a plan has the command's reason, and the line of the trainer's source that forbids it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isfinite
from pathlib import Path

from darts_parallel.config import NEWEST, read_yaml, run_main
from darts_parallel.errors import Entries
from darts_parallel.problem import read_rows
from darts_parallel.report import markdown_table
from experiments.data import DATA
from experiments.study import Study, StudyOptions, report_text, run_study

PROBLEMS: dict[str, str] = read_yaml(DATA / "problems.yaml")["answers"]
"""Arguments of the command, by the name of a job."""
EARLIER = DATA / "answers_8f9112a.csv"
"""Answers of commit 8f9112a to the same jobs, by its own cost model: its page, run at be73a1f."""
REFUSALS = DATA / "refusals.yaml"
LIMIT = 600.0
"""Longest seconds of a command; one that takes longer counts as without an answer."""
WHOLE = 0.2
"""Chance of running out that the command asks for by default."""
HEADER = (
    "job",
    "trainer",
    "plan",
    "s",
    "uniform s",
    "fits %",
    "command s",
    "8f9112a",
    "its s",
    "its fits %",
)
TIED = 0.01
"""`search.tie`: seconds that a plan which is easier to run may cost above the fastest one."""


@dataclass(frozen=True)
class TrainerAnswer:
    """Hold what one command answers."""

    problem: str
    trainer: str
    plan: str = ""
    """Degrees, micro-batches and schedule in a line."""
    iteration_time_s: float = inf
    uniform_s: float = inf
    """Seconds of the trainer's best uniform plan, where the exhaustive search ended."""
    fits: float = 0.0
    """Chance that no device of the job runs out of memory."""
    warned: bool = False
    """Whether the report says that no plan keeps the chance."""
    command_s: float = 0.0
    """Wall-clock seconds of the whole command."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def slower(self) -> bool:
        """Whether it is slower than the uniform plan by more than ties may cost."""
        return self.iteration_time_s > self.uniform_s * (1.0 + TIED) * (1.0 + 1e-9)


def answer(task: tuple[str, str, float]) -> list[TrainerAnswer]:
    """Run one command in a process of its own and read its plan file."""
    problem, trainer, limit = task
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "darts_parallel", *PROBLEMS[problem].split()]
        command += [f"trainer={trainer}", f"hydra.run.dir={folder}/run"]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return [TrainerAnswer(problem, trainer, reason=f"no answer within {limit:g} s")]
        seconds = time.monotonic() - began
        if done.returncode:
            reason = " ".join((done.stderr or done.stdout).split())
            return [TrainerAnswer(problem, trainer, command_s=seconds, reason=reason)]
        found = json.loads(Path(folder, "run", "plan.json").read_text(encoding="utf-8"))
    warned = "that keeps space.out_of_memory" in done.stdout or "no plan keeps" in done.stdout
    return [read_answer(TrainerAnswer(problem, trainer, warned=warned, command_s=seconds), found)]


def read_answer(row: TrainerAnswer, found: Entries) -> TrainerAnswer:
    """Return a row with what a plan file says."""
    predicted = found["predicted"]
    degrees = found["parallelism"]
    equal = " · ".join(f"{key} {degrees[key]}" for key in ("dp", "tp", "pp") if degrees[key])
    chosen = predicted["iteration_time_s"]
    batches = f"{degrees['micro_batch_size'] or 'layer-wise'} × {found['num_micro_batches']}"
    checks = found["verification"].values()
    checks = [own for own in checks if own["space"] == "uniform" and own["proven"]]
    uniform = [own["iteration_time_s"] for own in checks if own["iteration_time_s"]]
    fits = 1 - predicted["out_of_memory_probability"]
    figures = {"uniform_s": min(uniform, default=inf), "fits": fits}
    return replace(row, plan=f"{equal} · {batches}", iteration_time_s=chosen, **figures)


def forbidden_by(row: TrainerAnswer, sources: Sequence[dict[str, str]]) -> str:
    """Return the line of a trainer's source that forbids a job, and what it says; empty: not known."""
    for own in sources:
        if own["trainer"] == row.trainer and own["words"] in row.reason:
            return f"`{own['line']}`: {own['says']}"
    return ""


def report(rows: Sequence[TrainerAnswer]) -> str:
    """Return a line a job and trainer, those that take nothing in a table of their own."""
    earlier = {(row["problem"], row["trainer"]): row for _, row in read_rows(EARLIER, ())}
    sources = read_yaml(REFUSALS)
    said = [row for row in rows if not row.reason]
    none = [row for row in rows if row.reason]
    cells = []
    for row in said:
        own = earlier.get((row.problem, row.trainer), {})
        before = [own.get(key, "") for key in ("plan", "seconds", "fits")]
        cells.append(_cells(row) + before)
    refused = []
    for row in none:
        line = forbidden_by(row, sources)
        refused.append((row.problem, row.trainer, row.reason[:120], line))
    risky = [row.warned for row in said if row.fits < 1 - WHOLE]
    slower = sum(row.slower for row in said)
    verdict = (
        f"{len(said)} of {len(rows)} pairs have a plan, {len(none)} have a reason. {len(risky)} plans run "
        f"out of memory with more than {100 * WHOLE:.0f} %; no plan keeps that in {sum(risky)} of them. "
        f"{slower} plans are more than {100 * TIED:.0f} % slower than the same trainer's best uniform plan; "
        "up to that, `search.tie` takes the plan that is easier to run."
    )
    table = markdown_table(HEADER, cells, (0, 1, 2, 7))
    jobs = [f"- {name}: `darts-parallel {told}`" for name, told in PROBLEMS.items()]
    why = markdown_table(("job", "trainer", "no plan", "source"), refused, (0, 1, 2, 3))
    return report_text(verdict, "Jobs:", jobs, table, why)


def _cells(row: TrainerAnswer) -> list[str]:
    """Return the cells of a plan."""
    figures = (row.iteration_time_s, row.uniform_s)
    seconds = [f"{value:.4g}" if isfinite(value) else "" for value in figures]
    rest = (f"{100 * row.fits:.0f}", f"{row.command_s:.1f}")
    return [row.problem, row.trainer, row.plan, *seconds, *rest]


def run(options: StudyOptions) -> int:
    """Run all commands; returns the exit status."""
    study = Study(
        "answers",
        "Which plan does each trainer get, and does it fit?",
        "whether the plans run: seconds and chances are the cost model's; 8f9112a's are by its own figures.",
        answer,
        report,
    )
    pairs = product(PROBLEMS, NEWEST)
    return run_study(study, {", ".join(pair): (*pair, LIMIT) for pair in pairs}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.answers", run))
