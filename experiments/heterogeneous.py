"""Random clusters of two node types: how often the search finds the optimum over all orders of the nodes.

Speeds, memory, links and node sizes are random, the model is tiny, so that the exact planner (itself equal to
brute force in the tests) answers every problem. Both relaxations of the placement are searched with equal
settings: `enumerated` orders, and `relaxed` weights of them. Writes `heterogeneous.csv`.

    python -m experiments.heterogeneous problems=64 publish=true
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console

from darts_parallel.config.checks import require_at_least, require_members
from darts_parallel.config.options import run_main
from darts_parallel.config.search import PLACEMENTS
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.layerwise import solve
from darts_parallel.gradient.descent import search_tables
from darts_parallel.plan.file import write_text
from darts_parallel.problem.cluster import Link
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import csv_of, filled_table, markdown_table
from experiments.comparison.interruption import unless_interrupted
from experiments.comparison.quantiles import EXACT
from experiments.results_page import publish, result_folder

PINS = ["space.num_micro_batches=[1,4]", "training.global_batch_size=4", "space.zero_stage=1",
        "space.recompute=[none,full]", "space.sequence_parallel=false"]  # fmt: skip

HEADER = (
    "placement", "polished: optimal", "largest gap %", "raw: optimal", "largest gap %", "CPU s each",
)  # fmt: skip
METHOD = """Random clusters of two node types (speed, memory, links, node sizes) for a tiny model; the
layer-wise search against the proven optimum over all orders of the nodes, which is equal to brute force
over all plans and orders in the tests. One seed a problem; problems that no plan fits are left out."""


@dataclass
class HeterogeneousOptions:
    """Command line of `python -m experiments.heterogeneous`."""

    problems: int = 40
    first: int = 0
    """Seed of the first problem."""
    num_layers: int = 2
    num_steps: int = 300
    placements: list[str] = field(default_factory=lambda: ["enumerated", "relaxed"])
    out: str = "outputs/heterogeneous"
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        require_at_least("problems", self.problems, 1)
        require_at_least("first", self.first, 0)
        require_at_least("num_layers", self.num_layers, 1)
        require_at_least("num_steps", self.num_steps, 1)
        require_members("placements[]", self.placements, PLACEMENTS)


@dataclass(frozen=True)
class Row:
    """One problem searched with one placement."""

    problem: int
    placement: str
    gap: float
    """Of the polished plan from the proven optimum."""
    raw_gap: float
    seconds: float
    """CPU seconds of one thread."""


def random_mixed(seed: int, num_layers: int = 2) -> Problem:
    """Two device types of random speed, memory, links and node sizes; few layers and strategies."""
    rng = torch.Generator().manual_seed(seed)

    def factor(low: float, high: float) -> float:
        return float(low * (high / low) ** float(torch.rand(1, generator=rng)))

    names = ["model=toy", "cluster=toy_mixed", "training=toy", f"model.num_layers={num_layers}"]
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


def rows(options: HeterogeneousOptions) -> Iterator[Row]:
    """Every problem that some plan fits, searched with every placement."""
    torch.set_num_threads(1)
    for seed in range(options.first, options.first + options.problems):
        problem = random_mixed(seed, options.num_layers)
        tables = build_tables(problem)
        best = solve(tables, "layerwise")
        if best.best is None:
            continue
        for placement in options.placements:
            began = time.process_time()
            config = replace(problem.config.search, placement=placement, num_steps=options.num_steps)
            found = search_tables(tables, "layerwise", config, seed)
            seconds = time.process_time() - began
            if found is not None:
                unless_interrupted(found)
            polished, raw = (
                (float("inf"),) * 2 if found is None else (found.iteration_time_s, found.raw_iteration_time_s)
            )
            yield Row(seed, placement, polished / best.cost - 1.0, raw / best.cost - 1.0, seconds)


def study(options: HeterogeneousOptions, console: Console) -> int:
    """Search, print the shares, and write `heterogeneous.csv`; returns the exit status."""
    folder = result_folder(options.out)
    done = list(rows(options))
    write_text(folder / "heterogeneous.csv", csv_of(Row, done))
    lines = [
        shares(placement, mine)
        for placement in options.placements
        if (mine := [row for row in done if row.placement == placement])
    ]
    title = f"Random clusters of two node types, {options.num_layers} layers, {options.num_steps} steps"
    console.print(filled_table(title, HEADER, lines))
    if options.publish:
        command = f"python -m experiments.heterogeneous problems={options.problems}"
        publish("heterogeneous", "Two node types: is the placement found?", command,
                "\n".join([METHOD, "", *markdown_table(HEADER, lines)]))  # fmt: skip
    return 0


def shares(placement: str, mine: Sequence[Row]) -> tuple[str, ...]:
    """One line of the table, as `HEADER`: how many plans are optimal, and the largest gap."""

    def optimal(gaps: Sequence[float]) -> tuple[str, str]:
        worst = max(gaps)
        return (
            f"{sum(gap < EXACT for gap in gaps)} of {len(gaps)}",
            f"{100 * worst:.3f}" if worst > EXACT else "0",
        )

    seconds = f"{sum(row.seconds for row in mine) / len(mine):.1f}"
    return (placement, *optimal([row.gap for row in mine]), *optimal([row.raw_gap for row in mine]), seconds)


if __name__ == "__main__":
    raise SystemExit(
        run_main(
            "experiments.heterogeneous",
            __doc__,
            HeterogeneousOptions,
            lambda options: study(options, Console()),
        )
    )
