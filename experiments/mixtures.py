"""Four searches of mixtures of experts, each beside the published mapping priced by the same `evaluate`.

    python -m experiments.mixtures                               # all four, about four minutes of one core
    python -m experiments.mixtures jobs=[mixtral_8x22b] seconds=20

The gap is the mapping's and not the software's: model, job, precision and dispatcher are equal on both sides.
The published mapping is taken with its degrees and its recomputation, its blocks dealt evenly; it is priced
interleaved as published, and without interleaving, since the search is over plans without.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from darts_parallel.config.checks import require_at_least, require_members
from darts_parallel.config.options import run_main
from darts_parallel.cost.evaluation import CostBreakdown, evaluate
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError
from darts_parallel.exact.layerwise import solve
from darts_parallel.plan.strategy import LayerStrategy, Plan
from darts_parallel.problem.cluster import GIB
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import markdown_table
from experiments.results_page import publish

BALANCED = ["training.moe_load_imbalance=1", "training.moe_token_dispatcher_type=flex"]


@dataclass(frozen=True)
class Job:
    """A problem and the mapping that somebody published for it."""

    overrides: tuple[str, ...]
    source: str
    tp: int
    pp: int
    ep: int
    etp: int
    virtual_stages: int
    recompute: str


JOBS = {
    "deepseek_v3_gb200": Job(
        ("model=deepseek_v3", "training=deepseek_v3", "cluster=gb200_nvl72", "cluster.nodes.0.count=64",
         "training.precision=mxfp8", *BALANCED),
        "arXiv 2603.07685, table 20", 1, 4, 64, 1, 4, "selective",
    ),
    "deepseek_v3_h100": Job(
        ("model=deepseek_v3", "training=deepseek_v3", "cluster=h100_128x8", "training.precision=fp8",
         "training.overlap_moe_expert_parallel_comm=true", *BALANCED),
        "arXiv 2603.07685, tables 17 and 18", 2, 8, 64, 1, 4, "selective",
    ),
    "qwen3_235b_a22b": Job(
        ("model=qwen3_235b_a22b", "training=qwen3_235b_a22b", "cluster=h100_8x8", "cluster.nodes.0.count=32",
         "training.precision=fp8", *BALANCED),
        "Megatron-Bridge, docs/performance-summary.md", 2, 8, 32, 1, 4, "none",
    ),
    "mixtral_8x22b": Job(
        ("model=mixtral_8x22b", "training=mixtral_8x22b", "cluster=h100_16x8",
         "model.moe_expert_capacity_factor=1", "training.moe_load_imbalance=1"),
        "arXiv 2504.14960, table 3 (with folding)", 2, 8, 8, 1, 1, "none",
    ),
}  # fmt: skip


@dataclass
class MixtureOptions:
    """What to search."""

    jobs: list[str] = field(default_factory=lambda: list(JOBS))
    seconds: float = 60.0
    """Wall-clock of each search; one that is not proven by then states its bound."""
    publish: bool = False
    """Write experiments/results/mixtures.md, too."""

    def __post_init__(self) -> None:
        require_members("jobs", self.jobs, tuple(JOBS))
        require_at_least("seconds", self.seconds, 0, strict=True)


@dataclass(frozen=True)
class Row:
    """One search and the published mapping beside it."""

    job: str
    plan: Plan
    cost: CostBreakdown
    lower_bound_s: float
    proven: bool
    seconds: float
    """CPU seconds of the search, one core."""
    published: CostBreakdown
    """Interleaved as published."""
    plain: CostBreakdown
    """Price of the mapping without interleaving."""


def published_plan(job: Job, problem: Problem, virtual_stages: int) -> Plan:
    """The published mapping: one strategy, blocks dealt evenly, embedding first and head last."""
    batch, devices = problem.training.global_batch_size, problem.cluster.num_devices
    dp, chunks = devices // (job.tp * job.pp), job.pp * virtual_stages
    strategy = LayerStrategy(job.tp, dp, 1, job.recompute, job.tp > 1, ep=job.ep, etp=job.etp)
    blocks = problem.model.config.num_layers
    # the embedding and the head count as a block each, as Megatron-LM's layouts deal them
    edges = [round((blocks + 2) * chunk / chunks) for chunk in range(chunks)]
    layers = len(problem.model.layers)
    return Plan(batch // dp, (*edges, layers), (strategy,) * layers, virtual_stages=virtual_stages)


def search_job(name: str, seconds: float) -> Row:
    """Search one job within `seconds` of wall-clock and price the published mapping."""
    job = JOBS[name]
    problem = load_problem(list(job.overrides))
    began, cpu = time.monotonic(), time.process_time()
    tables = build_tables(problem)
    uniform = solve(tables, "uniform", deadline=began + seconds / 2)
    answer = solve(tables, "layerwise", uniform.cost, began + seconds)
    best = answer.best or uniform.best
    if best is None:
        raise ConfigError(f"seconds={seconds:g} found no plan for {name}; nearest legal: {4 * seconds:g}.")
    plan = best.to_plan(tables)
    spent = time.process_time() - cpu
    return Row(
        job=name,
        plan=plan,
        cost=evaluate(plan, problem),
        lower_bound_s=answer.lower_bound,
        proven=answer.proven,
        seconds=spent,
        published=evaluate(published_plan(job, problem, job.virtual_stages), problem),
        plain=evaluate(published_plan(job, problem, 1), problem),
    )


def sentence(row: Row) -> str:
    """One row for the terminal."""
    batch = load_problem(list(JOBS[row.job].overrides)).training.global_batch_size
    claim = _claim(row)
    return (
        f"{row.job}: {row.plan.describe(batch)}; {row.cost.iteration_time_s:.2f} s, {claim}, after "
        f"{row.seconds:.0f} CPU s; published {row.published.iteration_time_s:.2f} s interleaved"
        f"{_fits(row.published)}, {row.plain.iteration_time_s:.2f} s plain{_fits(row.plain)}"
    )


def _claim(row: Row) -> str:
    """What is proven of the plan; nothing where time ran out before the first bound."""
    if row.proven:
        return "optimal in the model"
    if row.lower_bound_s <= 0.0:
        return "best found, no bound in time"
    return f"at most {row.cost.iteration_time_s / row.lower_bound_s - 1.0:.1%} above the optimum"


def _fits(cost: CostBreakdown) -> str:
    if cost.feasible:
        return ""
    return f" ({max(cost.memory_bytes) / GIB:.0f} GiB: does not fit)"


def markdown(rows: list[Row]) -> str:
    """The table of results."""
    header = ("job", "plan found", "s/iteration", "claim", "search, CPU s", "published mapping, s",
              "without interleaving, s", "found plan ahead by")  # fmt: skip
    cells = []
    for row in rows:
        batch = load_problem(list(JOBS[row.job].overrides)).training.global_batch_size
        ahead = row.published.iteration_time_s / row.cost.iteration_time_s - 1.0
        cells.append((
            row.job, row.plan.describe(batch), f"{row.cost.iteration_time_s:.2f}", _claim(row),
            f"{row.seconds:.0f}",
            f"{row.published.iteration_time_s:.2f}{_fits(row.published)}",
            f"{row.plain.iteration_time_s:.2f}{_fits(row.plain)}", f"{ahead:.1%}",
        ))  # fmt: skip
    lines = markdown_table(header, cells, (0, 1, 3))
    sources = [f"- {name}: {JOBS[name].source}" for name in (row.job for row in rows)]
    return "\n".join([*lines, "", "Published mappings:", "", *sources])


def study(options: MixtureOptions) -> int:
    """Search all jobs, print them, and write the page where asked; returns the exit status."""
    console, rows = Console(), []
    for name in options.jobs:
        rows.append(search_job(name, options.seconds))
        console.print(sentence(rows[-1]), highlight=False, soft_wrap=True)
    if options.publish:
        page = publish(
            "mixtures", "Mixtures of experts: the searched plan beside the published mapping",
            f"python -m experiments.mixtures seconds={options.seconds:g} publish=true", markdown(rows),
        )  # fmt: skip
        console.print(str(Path(page)), highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.mixtures", __doc__, MixtureOptions, study))
