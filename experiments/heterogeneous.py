"""Search random clusters of two node types: how often is the optimum over all orders of the nodes found?

    python -m experiments.heterogeneous problems=64
    python -m experiments.heterogeneous problems=2 num_steps=30      # a first try, seconds

Speeds, memory, links and node sizes are random, the model is tiny, so that the exact planner (itself equal to
brute force in the tests) answers every problem.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.gradient.descent import search_tables
from darts_parallel.problem.cluster import Link
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import markdown_table
from experiments.comparison.quantiles import EXACT, percent
from experiments.study import Report, Study, StudyOptions, run_study, unless_interrupted

PINS = ["space.num_micro_batches=[1,4]", "training.global_batch_size=4", "space.zero_stage=1",
        "space.recompute=[none,full]", "space.sequence_parallel=false"]  # fmt: skip


@dataclass
class HeterogeneousOptions(StudyOptions):
    """Command line of `python -m experiments.heterogeneous`."""

    problems: int = 64
    """Number of random clusters, seeds 0 to `problems` - 1."""
    num_steps: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("problems", self.problems, 1)
        require_at_least("num_steps", self.num_steps, 1)


@dataclass(frozen=True)
class MixedClusterRun:
    """Hold one random cluster and the plans that the search found for it."""

    problem: int
    gap: float
    """Relative distance of the polished plan from the proven optimum."""
    raw_gap: float
    seconds: float
    """CPU seconds of one thread."""


def random_mixed(seed: int) -> Problem:
    """Draw two device types of random speed, memory, links and node sizes; few layers and strategies."""
    rng = torch.Generator().manual_seed(seed)

    def factor(low: float, high: float) -> float:
        return float(low * (high / low) ** float(torch.rand(1, generator=rng)))

    names = ["model=toy", "cluster=toy_mixed", "training=toy", "model.num_layers=2"]
    problem = load_problem([*names, *PINS])
    groups = []
    for group in problem.cluster.groups:
        device = replace(
            group.device,
            memory=group.device.reserved + factor(1.0e6, 8e6),
            peak_flops=float(group.device.peak_flops) * factor(0.1, 3.0),
            layer_overhead=1e-5 * factor(0.3, 3.0),
        )
        link = Link(factor(1e8, 4e10), 1e-6 * factor(1.0, 9.0), bool(torch.rand(1, generator=rng) < 0.5))
        nic = Link(factor(1e8, 4e10), 1e-6 * factor(1.0, 9.0)) if torch.rand(1, generator=rng) < 0.5 else None
        count, gpus = ((1, 4), (2, 2), (1, 2))[int(torch.randint(3, (1,), generator=rng))]
        groups.append(replace(group, device=device, intra_node=link, inter_node=nic, count=count, gpus=gpus))
    return replace(problem, cluster=replace(problem.cluster, groups=tuple(groups)))


def search_cluster(seed: int, num_steps: int) -> list[MixedClusterRun]:
    """Search one random cluster; no row where no plan fits it."""
    problem = random_mixed(seed)
    tables = build_tables(problem)
    best = find_layerwise_plan(tables, "layerwise")
    if best.best is None:
        return []
    began = time.process_time()
    found = search_tables(tables, "layerwise", replace(problem.config.search, num_steps=num_steps), seed)
    seconds, none = time.process_time() - began, float("inf")
    if found is None:
        return [MixedClusterRun(seed, none, none, seconds)]
    unless_interrupted(found)
    polished, raw = found.iteration_time_s / best.cost - 1.0, found.raw_iteration_time_s / best.cost - 1.0
    return [MixedClusterRun(seed, polished, raw, seconds)]


def report(runs: Sequence[MixedClusterRun], num_steps: int) -> Report:
    """Return how many plans are optimal, raw and polished."""
    lines = []
    for name, gaps in (("polished", [run.gap for run in runs]), ("raw", [run.raw_gap for run in runs])):
        optimal = str(sum(gap < EXACT for gap in gaps))
        lines.append((name, str(len(gaps)), optimal, percent(max(gaps))))
    seconds = sum(run.seconds for run in runs) / len(runs)
    note = (
        f"Random clusters of two node types, a toy model of two blocks, {num_steps} steps, one seed each: "
        "the layer-wise search against the proven optimum over all orders of the nodes. Clusters that no "
        "plan fits are left out."
    )
    verdict = f"Polished plans are optimal on {lines[0][2]} of {len(runs)} clusters; {seconds:.1f} s each."
    return Report(note, markdown_table(("plans", "clusters", "optimal", "largest gap"), lines), verdict)


def run(options: HeterogeneousOptions) -> int:
    """Search every cluster; returns the exit status."""
    study = Study(
        "heterogeneous",
        "Two node types: is the placement found?",
        "more than two types, or models so large that no method here proves the optimum.",
        partial(search_cluster, num_steps=options.num_steps),
        partial(report, num_steps=options.num_steps),
    )
    return run_study(study, {f"cluster {seed}": seed for seed in range(options.problems)}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.heterogeneous", __doc__, HeterogeneousOptions, run))
