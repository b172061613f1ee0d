"""Replanning after nodes are lost: warm start from the old plan against a cold gradient search.

    python -m experiments.replan                                     # 18 losses, about 5 CPU minutes
    python -m experiments.replan jobs=[toy on toy_mixed] losses=2    # a first try

For random losses of nodes from preset clusters: CPU seconds of both, and of the exact dynamic programme from
scratch (one thread, so that a shared machine counts little), how far both plans are from the optimum that
it proves, and the state that moves. Writes `replan.csv`.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

import torch
from rich.console import Console

from darts_parallel.bilevel.report import spread
from darts_parallel.config.checks import require_at_least, require_members
from darts_parallel.config.options import run_main
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.layerwise import solve
from darts_parallel.gradient.descent import search
from darts_parallel.plan.file import write_text
from darts_parallel.plan.space import outer_spaces
from darts_parallel.planner.replanning import replan
from darts_parallel.planner.state_moves import state_moves
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.format import size
from darts_parallel.report.tables import csv_of, markdown_table
from experiments.comparison.interruption import unless_interrupted
from experiments.comparison.quantiles import EXACT
from experiments.results_page import publish

JOBS = {
    "gpt2_xl on a10_8x4": ["model=gpt2_xl", "training=gpt2_xl", "cluster=a10_8x4"],
    "bert_345m on a10_8x4": ["model=bert_345m", "training=bert_345m", "cluster=a10_8x4"],
    "t5_1_3b on a10_8x4": ["model=t5_1_3b", "training=t5_1_3b", "cluster=a10_8x4"],
    "gpt2_xl on a10_a100_mixed": ["model=gpt2_xl", "training=gpt2_xl", "cluster=a10_a100_mixed"],
    "llama3_8b on h100_8x8": ["model=llama3_8b", "training=llama3_8b", "cluster=h100_8x8"],
    "toy on toy_mixed": ["model=toy", "training=toy", "cluster=toy_mixed"],
}

METHOD = """Plans for whole clusters, from which random nodes are taken away; then a new plan, warm from the
one that ran, and cold by the gradient search with all its settings. CPU seconds of one thread, smallest to
largest over the losses of a job; the exact programme gets two minutes, and a plan that it does not prove in
them counts against no optimum."""


@dataclass
class ReplanOptions:
    """Command line of `python -m experiments.replan`."""

    jobs: list[str] = field(default_factory=lambda: list(JOBS))
    losses: int = 3
    """Random losses of every job."""
    seed: int = 0
    exact_seconds: float = 120.0
    """What the exact programme gets for one problem."""
    overrides: list[str] = field(default_factory=list)
    """Hydra overrides of every job."""
    out: str = "outputs/replan"
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        require_members("jobs[]", self.jobs, tuple(JOBS))
        require_at_least("losses", self.losses, 1)
        require_at_least("seed", self.seed, 0)
        require_at_least("exact_seconds", self.exact_seconds, 0)


@dataclass(frozen=True)
class Row:
    """One loss of nodes."""

    job: str
    nodes: str
    """Nodes left of every node group."""
    warm_seconds: float
    cold_seconds: float
    exact_seconds: float
    warm_iteration_time_s: float
    cold_iteration_time_s: float
    optimum_s: float
    """Seconds per iteration; not a number where it was not proven."""
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

    @property
    def gap_to_optimum(self) -> float:
        """How much slower the warm plan is than the optimum in the model."""
        return self.warm_iteration_time_s / self.optimum_s - 1.0


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
        problem = load_problem([*JOBS[job], *options.overrides])
        rng = random.Random(f"{job} {options.seed}")
        plan = unless_interrupted(search(problem, seed=options.seed)).plan
        for _ in range(options.losses):
            smaller = lost(problem, rng)
            began = time.process_time()
            warm = unless_interrupted(replan(smaller, plan, seed=options.seed))
            middle = time.process_time()
            cold = unless_interrupted(search(smaller, seed=options.seed))
            end = time.process_time()
            tables = build_tables(smaller)
            exact = solve(tables, "layerwise", deadline=time.monotonic() + options.exact_seconds)
            moves = state_moves(plan, problem, warm.plan, smaller)
            yield Row(
                job=job,
                nodes=" + ".join(str(group.count) for group in smaller.cluster.groups),
                warm_seconds=middle - began,
                cold_seconds=end - middle,
                exact_seconds=time.process_time() - end,
                warm_iteration_time_s=warm.iteration_time_s,
                cold_iteration_time_s=cold.iteration_time_s,
                optimum_s=exact.cost if exact.proven else float("nan"),
                moved_bytes=moves.moved_bytes,
                restored_bytes=moves.restored_bytes,
            )


def study(options: ReplanOptions, console: Console) -> int:
    """Measure, print, and write `replan.csv`; returns the exit status."""
    folder = Path(options.out)
    done: list[Row] = []
    for row in rows(options):
        folder.mkdir(parents=True, exist_ok=True)  # what is refused leaves nothing behind
        done.append(row)
        console.print(
            f"{row.job}, {row.nodes} nodes left: {row.warm_seconds:.1f} s, cold {row.cold_seconds:.1f} s "
            f"({row.speedup:.1f} times), exact {row.exact_seconds:.1f} s; plan {100 * row.gap:+.2f} % "
            f"against the cold one, {100 * row.gap_to_optimum:+.2f} % against the optimum; "
            f"{size(row.moved_bytes)} move, {size(row.restored_bytes)} from a checkpoint",
            highlight=False,
            soft_wrap=True,
        )
        write_text(folder / "replan.csv", csv_of(Row, done))
    text = summary(done)
    console.print(text, highlight=False, soft_wrap=True)
    if options.publish:
        publish("replan", "How fast is a new plan after nodes are lost?", "python -m experiments.replan",
                "\n".join([METHOD, "", *table(done), "", text]))  # fmt: skip
    return 0


def table(done: Sequence[Row]) -> list[str]:
    """Lines of Markdown: the losses of every job, smallest and largest of each figure."""
    header = ("job", "nodes left", "warm s", "cold s", "times", "exact s", "over cold %", "over optimum %")
    rows = []
    for job in dict.fromkeys(row.job for row in done):
        mine = [row for row in done if row.job == job]
        proven = [100 * row.gap_to_optimum for row in mine if isfinite(row.optimum_s)]
        rows.append((
            job, "; ".join(row.nodes for row in mine), _range([row.warm_seconds for row in mine], ".1f"),
            _range([row.cold_seconds for row in mine], ".1f"), _range([row.speedup for row in mine], ".1f"),
            _range([row.exact_seconds for row in mine], ".1f"),
            _range([100 * row.gap for row in mine], ".3f"), _range(proven, ".3f"),
        ))  # fmt: skip
    return markdown_table(header, rows, (0, 1))


def _range(values: Sequence[float], form: str) -> str:
    """Smallest and largest, rounding apart; one text where they read the same, a dash where there is none."""
    if not values:
        return "-"
    ends = (value if abs(value) > 100 * EXACT else 0.0 for value in (min(values), max(values)))
    low, high = (f"{value:{form}}" for value in ends)
    return low if low == high else f"{low} to {high}"


def summary(done: Sequence[Row]) -> str:
    """One sentence over all losses: medians, smallest and largest."""
    faster = spread([row.speedup for row in done], ".1f")
    slower = spread([100 * row.gap for row in done], ".2f")
    proven = [100 * row.gap_to_optimum for row in done if isfinite(row.optimum_s)]
    return (
        f"{len(done)} losses: {faster} times faster than cold; plan slower than the cold search's by "
        f"{slower} %, than the {len(proven)} proven optima by {spread(proven, '.2f') if proven else '-'} %: "
        "medians (smallest to largest)."
    )


if __name__ == "__main__":
    raise SystemExit(
        run_main("experiments.replan", __doc__, ReplanOptions, lambda options: study(options, Console()))
    )
