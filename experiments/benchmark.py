"""Seconds of the jobs that have a target: medians over repeats, with their spread.

    python -m experiments.benchmark                            everything, a few minutes
    python -m experiments.benchmark only=[uniform] repeats=5   one of them

Run it on an idle machine. Prints a table; Ctrl-C keeps what is done.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact import layerwise as dynamic_programming
from darts_parallel.exact import uniform as exhaustive
from darts_parallel.gradient.descent import search
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import filled_table, markdown_table
from experiments.results_page import console_of, processor, publish

LLAMA = ["model=llama3_70b", "training=llama3_70b"]
COLUMNS = ("job", "median s", "min s", "max s", "target s", "met", "remark")


@dataclass
class BenchmarkOptions:
    """What to time."""

    repeats: int = 3
    only: list[str] = field(default_factory=list)
    """Parts of job names; none: all jobs."""
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        require_at_least("repeats", self.repeats, 1)


@dataclass(frozen=True)
class Job:
    """Something to time; `run` returns a remark on what it found."""

    name: str
    target: float
    """Seconds."""
    run: Callable[[], str]


def main_command() -> str:
    """The default main job in a process of its own, from typing the command to the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "darts_parallel", f"hydra.run.dir={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise DartsParallelError(f"the main job ended with status {done.returncode}: {done.stderr.strip()}")
    return "process start and TensorBoard included"


def default_search() -> str:
    """The search alone, on the default problem."""
    result = search(load_problem())
    return f"{result.iteration_time_s:.5g} s/iteration, {result.seconds:.1f} s by the search's own clock"


def llama_layerwise() -> str:
    """Search and exact verification of a large layer-wise problem."""
    problem = load_problem([*LLAMA, "cluster=h100_8x8"])
    result = search(problem)
    budget = problem.config.verification.max_seconds
    answer = dynamic_programming.find_plan(problem, budget=budget, incumbent=result.iteration_time_s)
    gap = result.iteration_time_s / answer.lower_bound_s - 1.0
    claim = (
        "gap to the proven answer" if answer.proven else "the oracle stopped early; gap to its lower bound"
    )
    return f"search {result.seconds:.1f} s, oracle {answer.seconds:.1f} s; {claim} {gap:.2%}"


def uniform_1024() -> str:
    """Every uniform plan of 1,024 GPUs, cost tables included."""
    answer = exhaustive.find_plan(load_problem([*LLAMA, "cluster=h100_128x8", "space=uniform"]))
    claim = "optimal in the model" if answer.proven else "best found"
    return f"{answer.iteration_time_s:.5g} s/iteration, {claim}"


JOBS = (
    Job("default main job, command to table", 8.0, main_command),
    Job("default search", 5.0, default_search),
    Job("64 H100 x llama3_70b layerwise, search and verification", 60.0, llama_layerwise),
    Job("1024 H100 x llama3_70b uniform, exhaustive", 2.0, uniform_1024),
)


def time_job(job: Job, repeats: int) -> tuple[list[float], str]:
    """Seconds of every repeat, and the last remark."""
    seconds, remark = [], ""
    for _ in range(repeats):
        began = time.perf_counter()
        remark = job.run()
        seconds.append(time.perf_counter() - began)
    return seconds, remark


def cells(job: Job, seconds: Sequence[float], remark: str) -> list[str]:
    """One row of the table, as `COLUMNS`; the median decides."""
    median = statistics.median(seconds)
    met = "yes" if median <= job.target else "NO"
    spread = [f"{value:.2f}" for value in (median, min(seconds), max(seconds))]
    return [job.name, *spread, f"{job.target:g}", met, remark]


def benchmark(options: BenchmarkOptions, jobs: Sequence[Job], console: Console) -> int:
    """Time the jobs one after the other; returns the exit status."""
    rows: list[list[str]] = []
    interrupted = False
    try:
        for job in jobs:
            with console.status(f"{job.name} ({options.repeats} repeats)"):
                rows.append(cells(job, *time_job(job, options.repeats)))
    except KeyboardInterrupt:
        interrupted = True
    note = f"Median of {options.repeats}, one thread, on {processor()}."
    console.print(filled_table(note, COLUMNS, rows, (0, len(COLUMNS) - 2, len(COLUMNS) - 1)))
    if options.publish and rows and not interrupted:
        text = "\n".join([note, "", *markdown_table(COLUMNS, rows, (0, len(COLUMNS) - 1))])
        publish("benchmark", "How long does it take?", "python -m experiments.benchmark", text)
    return 130 if interrupted else 0


def select(names: Sequence[str]) -> list[Job]:
    """The jobs whose name contains one of `names`; all without names.

    Errors:
        DartsParallelError: one of the names fits no job.
    """
    for name in names:
        if not any(name in job.name for job in JOBS):
            known = "; ".join(job.name for job in JOBS)
            raise DartsParallelError(f"only={name} is part of no job's name; the jobs are: {known}.")
    return [job for job in JOBS if not names or any(name in job.name for name in names)]


def _run(options: BenchmarkOptions) -> int:
    torch.set_num_threads(1)
    return benchmark(options, select(options.only), console_of(160))


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.benchmark", __doc__, BenchmarkOptions, _run))
