"""Plan jobs for every trainer, as the command does it, and show what an engineer would sign.

    python -m experiments.answers                                     # 12 jobs x 8 trainers, some 15 minutes
    python -m experiments.answers problems=[llama3_8b_h100] trainers=[none,megatron]

Every row is one run of `darts-parallel … trainer=NAME` with its defaults (`space.out_of_memory=0.2`), read
from its plan.json: seconds, ±, the chance that the whole job fits, the ladder; and the command's own seconds.
A trainer that takes no plan of a job is named with the command's reason.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from csv import DictReader
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from darts_parallel.config import require_members, run_main
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

PROBLEMS = {
    "t5_1_3b_a10": "model=t5_1_3b cluster=a10_8x4",
    "bert_345m_a10": "model=bert_345m cluster=a10_4x4",
    "gpt2_xl_a10": "model=gpt2_xl cluster=a10_8x4",
    "llama2_7b_v100": "model=llama2_7b cluster=v100_8x8 training.precision=fp16",
    "llama3_8b_a10": "model=llama3_8b cluster=a10_8x4",
    "llama3_8b_h100": "model=llama3_8b cluster=h100_8x8",
    "llama3_70b_h100": "model=llama3_70b cluster=h100_8x8",
    "llama3_405b_h100": "model=llama3_405b cluster=h100_128x8",
    "gpt3_175b_a100": "model=gpt3_175b cluster=a100_80_48x8",
    "mixtral_8x7b_h100": "model=mixtral_8x7b cluster=h100_8x8",
    "qwen3_30b_a3b_h100": "model=qwen3_30b_a3b cluster=h100_8x8",
    "nemotron_h_8b_h100": "model=nemotron_h_8b cluster=h100_8x8",
}
"""Arguments of the command, by the name of a job."""
TRAINERS = (
    "none",
    "megatron",
    "torchtitan",
    "deepspeed",
    "accelerate",
    "nanotron",
    "galvatron",
    "torch",
)
EARLIER = Path(__file__).parent / "data" / "answers_923a01c.csv"
"""Answers of commit 923a01c to the same jobs; its rule was that the median peak fits."""
WHOLE = 0.2
"""Chance of running out that the command asks for by default."""


@dataclass
class AnswerOptions(StudyOptions):
    """Command line of `python -m experiments.answers`."""

    problems: list[str] = field(default_factory=lambda: list(PROBLEMS))
    trainers: list[str] = field(default_factory=lambda: list(TRAINERS))
    seconds: float = 600.0
    """Longest time of a command; one that takes longer counts as without an answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("problems", self.problems, tuple(PROBLEMS))
        require_members("trainers", self.trainers, TRAINERS)


@dataclass(frozen=True)
class TrainerAnswer:
    """Hold what one command answers."""

    problem: str
    trainer: str
    plan: str = ""
    """Degrees, micro-batches and schedule in a line."""
    iteration_time_s: float = float("nan")
    half_width: float = float("nan")
    """Half the 80 % interval of the seconds, as a share of them."""
    fits: float = float("nan")
    """Chance that no device of the job runs out of memory."""
    ladder: str = ""
    command_s: float = float("nan")
    """Wall-clock seconds of the whole command."""
    reason: str = ""
    """Why there is no plan."""


def answer(task: tuple[str, str, float]) -> list[TrainerAnswer]:
    """Run one command in a process of its own and read its plan file."""
    problem, trainer, limit = task
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "darts_parallel",
            *PROBLEMS[problem].split(),
            f"trainer={trainer}",
            f"hydra.run.dir={folder}/run",
        ]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return [TrainerAnswer(problem, trainer, reason=f"no answer within {limit:g} s")]
        seconds = time.monotonic() - began
        if done.returncode:
            reason = " ".join((done.stderr or done.stdout).split())
            return [TrainerAnswer(problem, trainer, command_s=seconds, reason=reason[:120])]
        found = json.loads(Path(folder, "run", "plan.json").read_text(encoding="utf-8"))
    return [read_answer(problem, trainer, found, seconds)]


def read_answer(
    problem: str,
    trainer: str,
    found: dict[str, Any],
    seconds: float,
) -> TrainerAnswer:
    """Read a plan file."""
    predicted = found["predicted"]
    degrees = found["parallelism"]
    low, high = predicted["iteration_time_interval_s"]
    equal = " · ".join(f"{key} {degrees[key]}" for key in ("dp", "tp", "pp") if degrees[key])
    chosen = predicted["iteration_time_s"]
    rungs = (
        f"{100 * (rung['seconds'] / chosen - 1):+.1f} % ({100 * (1 - rung['chance']):.0f} %)"
        for rung in found["ladder"]
        if rung["plan"] != "plan.json"
    )
    batches = f"{degrees['micro_batch_size'] or 'layer-wise'} × {found['num_micro_batches']}"
    return TrainerAnswer(
        problem,
        trainer,
        f"{equal} · {batches}",
        chosen,
        (high - low) / (2 * chosen),
        1 - predicted["out_of_memory_probability"],
        ", ".join(rungs),
        seconds,
    )


def report(rows: Sequence[TrainerAnswer]) -> Report:
    """Return a line a job and trainer, those that take nothing in a list of their own."""
    earlier: dict[tuple[str, str], dict[str, str]] = {}
    if EARLIER.is_file():
        with EARLIER.open(encoding="utf-8", newline="") as lines:
            earlier = {(row["problem"], row["trainer"]): row for row in DictReader(lines)}
    cells = []
    none = []
    for row in rows:
        if row.reason:
            none.append(f"- {row.problem}, {row.trainer}: {row.reason}")
            continue
        old = earlier.get((row.problem, row.trainer), {})
        told = f"{row.command_s:.1f}"
        figures = (
            f"{row.iteration_time_s:.4g}",
            f"{100 * row.half_width:.0f}",
            f"{100 * row.fits:.0f}",
        )
        before = (old.get(name, "") for name in ("plan", "seconds", "fits"))
        cells.append((row.problem, row.trainer, row.plan, *figures, row.ladder, told, *before))
    risky = [row for row in rows if not row.reason and row.fits < 1 - WHOLE]
    said = [row for row in rows if not row.reason]
    header = (
        "job",
        "trainer",
        "plan",
        "s",
        "± %",
        "fits %",
        "ladder (fits)",
        "command s",
        "923a01c",
        "its s",
        "its fits %",
    )
    names = ", ".join(f"{row.problem} for {row.trainer}" for row in risky) or "none"
    verdict = (
        f"{len(said)} of {len(rows)} pairs have a plan; a chance above {100 * WHOLE:.0f} % to run out of "
        f"memory have {len(risky)} of them: {names}."
    )
    jobs = [f"- {name}: `darts-parallel {told}`" for name, told in PROBLEMS.items()]
    table = markdown_table(header, cells, (0, 1, 2, 6, 8))
    return Report(verdict, "Jobs:", jobs, table, "No plan:" if none else "", none)


def run(options: AnswerOptions) -> int:
    """Run all commands; returns the exit status."""
    study = Study(
        "answers",
        "Which plan does each trainer get, and does it fit?",
        "whether the plans run: seconds and chances are the cost model's; 923a01c's are by its own figures.",
        answer,
        report,
    )
    tasks = {
        f"{problem}, {trainer}": (problem, trainer, options.seconds)
        for problem in options.problems
        for trainer in options.trainers
    }
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.answers", __doc__, AnswerOptions, run))
