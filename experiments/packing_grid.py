"""Is the chosen budget of dynamic context parallelism near the best of a grid?

    python -m experiments.packing_grid                # about 5 minutes

Everything but the scheduler is free in the search. The chosen plan is then priced with 200 settings, over
the same draws. A setting of the grid takes part where it keeps the same chance of running out of memory.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from darts_parallel.config import DYNAMIC, run_main
from darts_parallel.planner import plan_lengths, price_packings
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.dynamic_cp import histograms, write_lengths
from experiments.study import Report, Study, StudyOptions, run_study

BUDGETS = 50
SMALLEST = (1, 2, 4, 8)
SHARED = (
    "training=any",
    "training.global_batch_size=256",
    f"training.sequence_packing_scheduler={DYNAMIC}",
)


@dataclass(frozen=True)
class GridJob:
    """Name a job and its histogram of lengths."""

    name: str
    histogram: str
    stretch: int
    """Factor of all lengths."""
    words: tuple[str, ...]


JOBS = (
    GridJob(
        "Qwen3-30B-A3B, 32 H100",
        "lognormal",
        1,
        ("model=qwen3_30b_a3b", "cluster=h100_8x8", "cluster.nodes.0.count=4", "space.ep=8"),
    ),
    GridJob("Llama 3 8B, 64 H100", "falling", 1, ("model=llama3_8b", "cluster=h100_8x8")),
    GridJob("Llama 3 70B, 128 H100", "two_kinds", 4, ("model=llama3_70b", "cluster=h100_16x8")),
)
"""Long tails up to 16,384 tokens, four times as long with 70B."""
CHANCES = (0.2, 0.5)
"""Values of `space.out_of_memory`; with 0.5 the memory is as predicted, and larger budgets fit."""


class Setting(NamedTuple):
    """Hold a budget, the smallest group, and the mean seconds of a step."""

    budget: int
    min_cp: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.budget:,}, cp ≥ {self.min_cp}"


@dataclass(frozen=True)
class GridRow:
    """Hold what the search chose for a job, next to the best of the grid."""

    name: str
    chance: float
    """Value of `space.out_of_memory`."""
    plan: str
    chosen: Setting
    best: Setting
    cpu_s: float
    """Processor seconds of the search."""


def solve(task: tuple[GridJob, float]) -> list[GridRow]:
    """Search a job's plan at a chance of no memory, and price it with every setting of the grid."""
    job, chance = task
    counts = {length * job.stretch: count for length, count in histograms()[job.histogram].items()}
    longest = max(counts)
    sizes = (f"training.seq_len={longest}", f"model.max_seq_len={longest}")
    with tempfile.TemporaryDirectory() as folder:
        file = write_lengths(Path(folder), counts)
        own = (f"training.lengths={file}", f"space.out_of_memory={chance}")
        problem = load_problem([*job.words, *SHARED, *sizes, *own])
        began = time.process_time()
        best = plan_lengths(problem, []).plans[0]
        took = time.process_time() - began
        least = longest // (best.plan.layers[0].dp * best.plan.cp)
        budgets = np.geomspace(least, 2 * longest, BUDGETS).astype(int).tolist()
        sizes_of = [best.packing._replace(min_cp=size) for size in SMALLEST]
        grid = [own._replace(budget=budget) for own in sizes_of for budget in budgets]
        grid_s = price_packings(problem, best.plan, grid)
    place = int(np.argmin(grid_s))
    known = best.packing
    words = best.plan.describe(problem.training.global_batch_size)
    found = grid[place]
    chosen = Setting(known.budget, known.min_cp, best.seconds[0])
    best_of_grid = Setting(found.budget, found.min_cp, grid_s[place])
    row = GridRow(job.name, chance, words, chosen, best_of_grid, took)
    return [row]


def report(rows: Sequence[GridRow]) -> Report:
    """Put the chosen settings next to the best ones of the grid."""
    head = (
        "job",
        "out of memory",
        "plan",
        "chosen",
        "step",
        "best of 200",
        "step",
        "chosen over best",
        "CPU",
    )
    lines = []
    for row in rows:
        first, second = row.chosen, row.best
        steps = [f"{own.seconds:.4g} s" for own in (first, second)]
        over = f"{first.seconds / second.seconds - 1.0:+.2%}"
        took = f"{row.cpu_s:.3g} s"
        settings = [str(first), steps[0], str(second), steps[1]]
        lines.append((row.name, f"{row.chance:.0%}", row.plan, *settings, over, took))
    note = (
        "Chosen and best: tokens of a rank and the smallest group. Out of memory: the largest chance that "
        "search and grid allow. CPU: processor seconds of the search, in which everything but the "
        "scheduler is free."
    )
    return Report(note, markdown_table(head, lines, left=(0, 2, 3, 5)))


def run(options: StudyOptions) -> int:
    """Solve all jobs; returns the exit status."""
    study = Study(
        "packing_grid",
        "Is the chosen budget of dynamic context parallelism near the best of a grid?",
        "measured steps; the histograms are made up; the grid has the chosen plan's degrees alone.",
        solve,
        report,
    )
    tasks = {f"{job.name}, {chance}": (job, chance) for job in JOBS for chance in CHANCES}
    return run_study(study, tasks, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.packing_grid", __doc__, StudyOptions, run))
