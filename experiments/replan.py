"""Replanning after nodes are lost: warm start from the old plan, cold gradient search, exact from scratch.

    python -m experiments.replan                              # 18 losses of nodes
    python -m experiments.replan problems='toy on toy_mixed'  # a first try

Some nodes of a cluster are lost at random, and the job goes on with those that are left.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from darts_parallel.config import require_members, run_main
from darts_parallel.cost import build_tables
from darts_parallel.exact import find_layerwise_plan
from darts_parallel.gradient import search
from darts_parallel.plan import outer_spaces
from darts_parallel.planner import moved_state, replan
from darts_parallel.problem import Problem, load_problem
from darts_parallel.report import markdown_table, size
from experiments.comparison.quantiles import percent, span
from experiments.study import Report, Study, StudyOptions, run_study, unless_interrupted

PROBLEMS = ("gpt2_xl on a10_8x4", "bert_345m on a10_8x4", "t5_1_3b on a10_8x4", "llama3_8b on h100_8x8",
            "gpt2_xl on a10_a100_mixed", "toy on toy_mixed")  # fmt: skip
"""Model and training preset, and cluster."""
LOSSES, EXACT_SECONDS = 3, 120.0
"""Random losses of every problem; seconds after which the exact programme stops without a proof."""


@dataclass
class ReplanOptions(StudyOptions):
    """Command line of `python -m experiments.replan`."""

    problems: list[str] = field(default_factory=lambda: list(PROBLEMS))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_members("problems[]", self.problems, PROBLEMS)


@dataclass(frozen=True)
class NodeLoss:
    """Hold one loss of nodes and the plans after it; seconds are CPU seconds of one thread."""

    problem: str
    nodes: str
    """Nodes left of every node group."""
    warm_seconds: float
    cold_seconds: float
    exact_seconds: float
    gap: float
    """Relative slowdown of the warm plan against the cold one; negative where it is faster."""
    gap_to_optimum: float | None
    """Relative slowdown of the warm plan against the optimum; None where it was not proven."""
    moved_bytes: float
    restored_bytes: float
    """Bytes that come from a checkpoint."""


def lost(problem: Problem, rng: random.Random) -> Problem:
    """Take a random number of nodes away, such that plans still exist."""
    groups = problem.config.cluster.nodes
    while True:
        nodes = [replace(group, count=rng.randint(1, group.count)) for group in groups]
        cluster = replace(problem.config.cluster, nodes=nodes)
        smaller = Problem.from_config(replace(problem.config, cluster=cluster))
        try:
            outer_spaces(smaller)
        except ValueError:
            continue  # the global batch divides into no data-parallel degree of these nodes
        if nodes != groups:
            return smaller


def replan_problem(name: str, losses: int = LOSSES) -> list[NodeLoss]:
    """Plan one problem, and plan it again after every loss."""
    model, cluster = name.split(" on ")
    problem = load_problem([f"model={model}", f"training={model}", f"cluster={cluster}"])
    rng = random.Random(name)
    plan, rows = unless_interrupted(search(problem, seed=0)).plan, []
    for _ in range(losses):
        smaller = lost(problem, rng)
        began = time.process_time()
        warm = unless_interrupted(replan(smaller, plan, seed=0))
        middle = time.process_time()
        cold = unless_interrupted(search(smaller, seed=0))
        end = time.process_time()
        exact = find_layerwise_plan(
            build_tables(smaller), "layerwise", deadline=time.monotonic() + EXACT_SECONDS
        )
        moves = moved_state(plan, problem, warm.plan, smaller)
        gaps = [warm.iteration_time_s / cost - 1.0 for cost in (cold.iteration_time_s, exact.cost)]
        rows.append(NodeLoss(
            name, " + ".join(str(group.count) for group in smaller.cluster.groups), middle - began,
            end - middle, time.process_time() - end, gaps[0], gaps[1] if exact.proven else None,
            moves.moved_bytes, moves.restored_bytes,
        ))  # fmt: skip
    return rows


def report(losses: Sequence[NodeLoss]) -> Report:
    """Return a line for each loss."""
    header = ("problem", "nodes left", "warm s", "cold s", "exact s", "over cold", "over optimum", "moves",
              "from a checkpoint")  # fmt: skip
    lines = [
        (x.problem, x.nodes, f"{x.warm_seconds:.1f}", f"{x.cold_seconds:.1f}", f"{x.exact_seconds:.1f}",
         percent(x.gap), percent(x.gap_to_optimum), size(x.moved_bytes), size(x.restored_bytes))
        for x in losses
    ]  # fmt: skip
    ratios = span([x.cold_seconds / x.warm_seconds for x in losses], ".1f")
    proven = [x.gap_to_optimum for x in losses if x.gap_to_optimum is not None]
    verdict = (
        f"The warm start is {ratios} times as fast as the cold search, and its plan {span(proven, '.2%')} "
        f"slower than the optimum, which is proven for {len(proven)} of {len(losses)} losses."
    )
    return Report("CPU seconds of one thread.", markdown_table(header, lines, (0, 1)), verdict)


def run(options: ReplanOptions) -> int:
    """Replan every problem; returns the exit status."""
    study = Study(
        "replan", "How fast is a new plan after nodes are lost?", "the seconds that moving the state and "
        "restarting the trainer take.", replan_problem, report,
    )  # fmt: skip
    return run_study(study, {name: name for name in options.problems}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.replan", __doc__, ReplanOptions, run))
