"""Replanning after nodes are lost: warm start from the old plan against a cold search, equal settings.

For random losses of nodes from preset clusters, over several seeds: seconds of both (CPU time of one thread,
so that a shared machine does not count), the quality of both plans, and the state that moves. Writes
`replan.csv`.
"""

import csv
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from darts_parallel.gradient_search import search
from darts_parallel.problem import Problem, load_problem
from darts_parallel.replan import replan
from darts_parallel.space import outer_spaces
from experiments.options import run_main

JOBS = {
    "gpt2_xl on a10_8x4": ["cluster=a10_8x4"],
    "bert_345m on a10_8x4": ["model=bert_345m", "training=bert_345m", "cluster=a10_8x4"],
    "t5_1_3b on a10_8x4": ["model=t5_1_3b", "training=t5_1_3b", "cluster=a10_8x4"],
    "gpt2_xl on a10_a100_mixed": ["cluster=a10_a100_mixed"],
    "toy on toy_mixed": ["model=toy", "training=toy", "cluster=toy_mixed"],
}


@dataclass
class ReplanOptions:
    """Command line of `python -m experiments.replan`."""

    jobs: list[str] = field(default_factory=lambda: list(JOBS))
    losses: int = 4
    """Random losses of every job."""
    seed: int = 0
    out: str = "outputs/replan"


@dataclass(frozen=True)
class Row:
    """One loss of nodes."""

    job: str
    nodes: str
    """Nodes left of every node group."""
    warm_seconds: float
    cold_seconds: float
    warm_iteration_time_s: float
    cold_iteration_time_s: float
    moved_bytes: float
    restored_bytes: float

    @property
    def speedup(self) -> float:
        """How many times faster the warm start answers."""
        return self.cold_seconds / self.warm_seconds

    @property
    def gap(self) -> float:
        """How much slower the warm plan is than the cold one; negative where it is faster."""
        return self.warm_iteration_time_s / self.cold_iteration_time_s - 1.0


def lost(problem: Problem, rng: random.Random) -> Problem:
    """The problem with a random number of nodes lost, such that plans still exist."""
    while True:
        groups = problem.config.cluster.nodes
        counts = [rng.randint(1, group.count) for group in groups]
        if counts == [group.count for group in groups]:
            continue
        nodes = [replace(group, count=count) for group, count in zip(groups, counts, strict=True)]
        config = replace(problem.config, cluster=replace(problem.config.cluster, nodes=nodes))
        smaller = Problem.from_config(config)
        try:
            outer_spaces(smaller)
        except ValueError:
            continue  # the global batch divides into no data-parallel degree of these nodes
        return smaller


def rows(options: ReplanOptions) -> Iterator[Row]:
    """Every loss in turn."""
    torch.set_num_threads(1)
    for job in options.jobs:
        problem, rng = load_problem(JOBS[job]), random.Random(f"{job} {options.seed}")
        plan = search(problem, seed=options.seed).plan
        for _ in range(options.losses):
            smaller = lost(problem, rng)
            began = time.process_time()
            warm = replan(smaller, plan, problem, seed=options.seed)
            middle = time.process_time()
            cold = search(smaller, seed=options.seed)
            yield Row(
                job=job,
                nodes=" + ".join(str(group.count) for group in smaller.cluster.groups),
                warm_seconds=middle - began,
                cold_seconds=time.process_time() - middle,
                warm_iteration_time_s=warm.result.iteration_time_s,
                cold_iteration_time_s=cold.iteration_time_s,
                moved_bytes=warm.moves.moved_bytes,
                restored_bytes=warm.moves.restored_bytes,
            )


def study(options: ReplanOptions, console: Console) -> int:
    """Measure, print, and write `replan.csv`; returns the exit status."""
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    done: list[Row] = []
    for row in rows(options):
        done.append(row)
        console.print(
            f"{row.job}, {row.nodes} nodes left: {row.speedup:.1f} times faster, plan {100 * row.gap:+.2f} %"
            f", {row.moved_bytes / 1e9:.1f} GB move, {row.restored_bytes / 1e9:.1f} GB from a checkpoint",
            highlight=False,
        )
        with (folder / "replan.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [entry.name for entry in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(entry) for entry in done)
    speedups, gaps = [row.speedup for row in done], [row.gap for row in done]
    console.print(
        f"{len(done)} losses: speed-up median {median(speedups):.1f} (from {min(speedups):.1f} to "
        f"{max(speedups):.1f}); plan slower than the cold search's: median {100 * median(gaps):.2f} %, "
        f"largest {100 * max(gaps):.2f} %.",
        highlight=False,
    )
    return 0


def main() -> int:
    """Entry point; returns the exit status."""
    return run_main("experiments.replan", __doc__, ReplanOptions, lambda options: study(options, Console()))


if __name__ == "__main__":
    raise SystemExit(main())
