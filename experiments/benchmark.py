"""Seconds of the commands that have a target: medians over repeats, with their spread.

    python -m experiments.benchmark                            everything, a few minutes
    python -m experiments.benchmark only=[uniform] repeats=5   one of them

Run it on an idle machine.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from darts_parallel.config import require_at_least, run_main
from darts_parallel.errors import ConfigError, DartsParallelError
from darts_parallel.gradient import search
from darts_parallel.planner import check, plan
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study, unless_interrupted

LLAMA = ["model=llama3_70b", "training=llama3_70b"]


@dataclass
class BenchmarkOptions(StudyOptions):
    """Command line of `python -m experiments.benchmark`."""

    jobs: int = 1
    repeats: int = 3
    only: list[str] = field(default_factory=list)
    """Parts of names; none: everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("repeats", self.repeats, 1)


@dataclass(frozen=True)
class Timed:
    """The seconds of one command or function."""

    name: str
    target_s: float
    median_s: float
    least_s: float
    most_s: float
    remark: str
    """The plan that was found, in words."""

    @property
    def met(self) -> bool:
        """Tell whether the median is within the target."""
        return self.median_s <= self.target_s


def main_command() -> str:
    """Run the default command in a process of its own, from typing it to the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "darts_parallel", f"hydra.run.dir={folder}"]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
    if done.returncode:
        raise DartsParallelError(
            f"the command ended with status {done.returncode}: {done.stderr.strip()}"
        )
    return "process start and TensorBoard included"


def default_search() -> str:
    """Run the gradient search alone, on the default problem."""
    result = unless_interrupted(search(load_problem()))
    return f"{result.iteration_time_s:.5g} s/iteration, {result.seconds:.1f} s by the search's own clock"


def llama_layerwise() -> str:
    """Search and verify a large layer-wise problem."""
    planned = plan(load_problem([*LLAMA, "cluster=h100_8x8", "space.out_of_memory=0.5"]))
    result = planned.result
    answer = planned.answers[-1]
    if result is None:
        raise DartsParallelError("the search found no plan; try more memory.")
    claim = "proven answer" if answer.proven else "lower bound of the proof, which stopped early"
    gap = f"gap to the {claim} {result.iteration_time_s / answer.lower_bound_s - 1.0:.2%}"
    return f"search {result.seconds:.1f} s, proof {answer.seconds:.1f} s; {gap}"


def uniform_1024() -> str:
    """Enumerate every uniform plan of 1,024 GPUs, cost tables included."""
    answer = check(load_problem([*LLAMA, "cluster=h100_128x8", "space=uniform"]), "exhaustive")
    claim = "optimal in the model" if answer.proven else "best found"
    return f"{answer.iteration_time_s:.5g} s/iteration, {claim}"


WORK: dict[str, tuple[float, Callable[[], str]]] = {
    "default command, process start to table": (8.0, main_command),
    "default search": (5.0, default_search),
    "64 H100 x llama3_70b layerwise, search and proof": (60.0, llama_layerwise),
    "1024 H100 x llama3_70b uniform, exhaustive": (2.0, uniform_1024),
}
"""Target in seconds, and what is timed, by name."""


def timed(name: str, repeats: int) -> list[Timed]:
    """Run one entry of `WORK` again and again."""
    target, work = WORK[name]
    seconds: list[float] = []
    remark = ""
    for _ in range(repeats):
        began = time.perf_counter()
        remark = work()
        seconds.append(time.perf_counter() - began)
    return [Timed(name, target, statistics.median(seconds), min(seconds), max(seconds), remark)]


def report(rows: Sequence[Timed], repeats: int) -> Report:
    """Return the medians next to their targets."""
    header = ("what", "median s", "min s", "max s", "target s", "met", "remark")
    cells = []
    for row in rows:
        seconds = [f"{value:.2f}" for value in (row.median_s, row.least_s, row.most_s)]
        verdict = "yes" if row.met else "NO"
        cells.append((row.name, *seconds, f"{row.target_s:g}", verdict, row.remark))
    met = sum(row.met for row in rows)
    return Report(
        f"Medians of {repeats}, one thread.",
        markdown_table(header, cells, (0, 6)),
        f"{met} of {len(rows)} are within their targets.",
    )


def run(options: BenchmarkOptions) -> int:
    """Time everything that is asked for; returns the exit status.

    Errors:
        ConfigError: one of the names fits nothing.
    """
    for part in options.only:
        if not any(part in name for name in WORK):
            raise ConfigError(f"only={part} is part of no name; the names are: {'; '.join(WORK)}.")
    names = [name for name in WORK if any(part in name for part in options.only or [""])]
    study = Study(
        "benchmark",
        "How long does it take?",
        "a machine that does other work, or more threads.",
        partial(timed, repeats=options.repeats),
        partial(report, repeats=options.repeats),
    )
    return run_study(study, {name: name for name in names}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.benchmark", __doc__, BenchmarkOptions, run))
