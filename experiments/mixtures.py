"""Searches of mixtures of experts, each next to the published mapping priced by the same `evaluate`.

    python -m experiments.mixtures                               # all four, some minutes
    python -m experiments.mixtures problems=[mixtral_8x22b] seconds=20

The gap is the mapping's, not the framework's: model, job, precision and dispatcher are equal on both sides.
The published mapping is taken with its degrees and its recomputation, its blocks dealt evenly; it is priced
interleaved as published, and without interleaving, since the search is over plans without.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from darts_parallel.config import require_at_least, require_members, run_main
from darts_parallel.cost import CostBreakdown, build_tables, evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.exact import find_layerwise_plan
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.problem import GIB, Problem, load_problem
from darts_parallel.report import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

BALANCED = ["training.moe_load_imbalance=1", "training.moe_token_dispatcher_type=flex"]


@dataclass(frozen=True)
class PublishedMapping:
    """Hold a problem and the mapping that somebody published for it."""

    overrides: tuple[str, ...]
    source: str
    tp: int
    pp: int
    ep: int
    etp: int
    virtual_stages: int
    recompute: str


MAPPINGS = {
    "deepseek_v3_gb200": PublishedMapping(
        ("model=deepseek_v3", "training=deepseek_v3", "cluster=gb200_nvl72", "cluster.nodes.0.count=64",
         "training.precision=mxfp8", *BALANCED),
        "arXiv 2603.07685, table 20", 1, 4, 64, 1, 4, "selective",
    ),
    "deepseek_v3_h100": PublishedMapping(
        ("model=deepseek_v3", "training=deepseek_v3", "cluster=h100_128x8", "training.precision=fp8",
         "training.overlap_moe_expert_parallel_comm=true", *BALANCED),
        "arXiv 2603.07685, tables 17 and 18", 2, 8, 64, 1, 4, "selective",
    ),
    "qwen3_235b_a22b": PublishedMapping(
        ("model=qwen3_235b_a22b", "training=qwen3_235b_a22b", "cluster=h100_8x8", "cluster.nodes.0.count=32",
         "training.precision=fp8", *BALANCED),
        "Megatron-Bridge, docs/performance-summary.md", 2, 8, 32, 1, 4, "none",
    ),
    "mixtral_8x22b": PublishedMapping(
        ("model=mixtral_8x22b", "training=mixtral_8x22b", "cluster=h100_16x8",
         "model.moe_expert_capacity_factor=1", "training.moe_load_imbalance=1"),
        "arXiv 2504.14960, table 3 (with folding)", 2, 8, 8, 1, 1, "none",
    ),
}  # fmt: skip


@dataclass
class MixtureOptions(StudyOptions):
    """Command line of `python -m experiments.mixtures`."""

    problems: list[str] = field(default_factory=lambda: list(MAPPINGS))
    seconds: float = 60.0
    """Wall-clock seconds of each search; one that is not proven by then states its bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("problems", self.problems, tuple(MAPPINGS))
        require_at_least("seconds", self.seconds, 0, strict=True)


@dataclass(frozen=True)
class MappingComparison:
    """Hold one search and the published mapping next to it."""

    problem: str
    plan: str
    iteration_time_s: float
    claim: str
    """Claim that is proven of the plan."""
    cpu_seconds: float
    """CPU seconds of the search, one thread."""
    published_s: float
    """Seconds per iteration of the mapping, interleaved as published."""
    published_fits: str
    """Empty, or how much memory the mapping needs."""
    plain_s: float
    """Seconds per iteration of the mapping without interleaving."""
    plain_fits: str


def published_plan(mapping: PublishedMapping, problem: Problem, virtual_stages: int) -> Plan:
    """Return the published mapping: one strategy, blocks dealt evenly, embedding first and head last."""
    batch, devices = problem.training.global_batch_size, problem.cluster.num_devices
    dp, chunks = devices // (mapping.tp * mapping.pp), mapping.pp * virtual_stages
    strategy = LayerStrategy(
        mapping.tp, dp, 1, mapping.recompute, mapping.tp > 1, ep=mapping.ep, etp=mapping.etp
    )
    blocks = problem.model.config.num_layers
    # the embedding and the head count as a block each, as Megatron-LM's layouts deal them
    edges = [round((blocks + 2) * chunk / chunks) for chunk in range(chunks)]
    layers = len(problem.model.layers)
    return Plan(batch // dp, (*edges, layers), (strategy,) * layers, virtual_stages=virtual_stages)


def search_mixture(name: str, seconds: float) -> list[MappingComparison]:
    """Search one problem within `seconds` of wall-clock and price the published mapping."""
    mapping = MAPPINGS[name]
    problem = load_problem(list(mapping.overrides))
    began, cpu = time.monotonic(), time.process_time()
    tables = build_tables(problem)
    uniform = find_layerwise_plan(tables, "uniform", deadline=began + seconds / 2)
    answer = find_layerwise_plan(tables, "layerwise", uniform.cost, began + seconds)
    best = answer.best or uniform.best
    if best is None:
        raise ConfigError(
            f"seconds={seconds:g} found no plan for {name}; closest valid value: {4 * seconds:g}."
        )
    spent, plan = time.process_time() - cpu, best.to_plan(tables)
    found = evaluate(plan, problem).iteration_time_s
    interleaved, plain = (
        evaluate(published_plan(mapping, problem, count), problem) for count in (mapping.virtual_stages, 1)
    )
    if answer.proven:
        claim = "optimal in the model"
    elif answer.lower_bound > 0.0:
        claim = f"at most {found / answer.lower_bound - 1.0:.1%} above the optimum"
    else:
        claim = "best found, no bound in time"
    words = plan.describe(problem.training.global_batch_size)
    return [MappingComparison(name, words, found, claim, spent, interleaved.iteration_time_s,
                              _fits(interleaved), plain.iteration_time_s, _fits(plain))]  # fmt: skip


def _fits(cost: CostBreakdown) -> str:
    return "" if cost.feasible else f" ({max(cost.memory_bytes) / GIB:.0f} GiB: does not fit)"


def report(rows: Sequence[MappingComparison]) -> Report:
    """Return the plan found and the mapping's price for each problem."""
    header = ("problem", "plan found", "s/iteration", "claim", "search, CPU s", "published mapping, s",
              "without interleaving, s", "found plan faster by")  # fmt: skip
    gains = [row.published_s / row.iteration_time_s - 1.0 for row in rows]
    cells = [
        (row.problem, row.plan, f"{row.iteration_time_s:.2f}", row.claim, f"{row.cpu_seconds:.0f}",
         f"{row.published_s:.2f}{row.published_fits}", f"{row.plain_s:.2f}{row.plain_fits}", f"{gain:.1%}")
        for row, gain in zip(rows, gains, strict=True)
    ]  # fmt: skip
    sources = [f"- {row.problem}: {MAPPINGS[row.problem].source}" for row in rows]
    verdict = (
        "In the model the plan found is faster than the published mapping on "
        f"{sum(gain > 0 for gain in gains)} of {len(rows)} problems, by {min(gains):.1%} to {max(gains):.1%}."
    )
    return Report(markdown_table(header, cells, (0, 1, 3)), verdict, "Published mappings:", sources)


def run(options: MixtureOptions) -> int:
    """Search every problem; returns the exit status."""
    study = Study(
        "mixtures",
        "Mixtures of experts: are published mappings improved?",
        "measured throughput; both sides are prices of the same cost model.",
        partial(search_mixture, seconds=options.seconds),
        report,
    )
    return run_study(study, {name: name for name in options.problems}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.mixtures", __doc__, MixtureOptions, run))
