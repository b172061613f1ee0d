"""The plans that need the least memory, and what to say when even they do not fit."""

from collections.abc import Sequence
from dataclasses import replace

from darts_parallel.config.schema import SpaceConfig
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.lightest import lightest_plans
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.errors import DartsParallelError, InfeasibleError
from darts_parallel.plan.space import outer_spaces
from darts_parallel.problem.cluster import GIB
from darts_parallel.problem.problem import Problem


def explain_infeasible(problem: Problem, tables: Sequence[CostTable]) -> InfeasibleError:
    """The error for a problem that no plan fits: the binding constraint and the smallest way out."""
    kind = problem.config.space.kind
    excess, detail, capacity = _least_excess(tables, kind)
    devices = [group.device for group in problem.cluster.groups]
    device = next((d for d in devices if d.memory - d.reserved == capacity), devices[0])
    needed = (device.memory + excess) / GIB
    ways = [f"cluster.devices.{device.name}.memory_GiB={-(-needed * 100 // 1) / 100:.2f}"]
    free = replace(problem.config.space, zero_stage=None, recompute=None, sequence_parallel=None,
                   pp=None, tp=None, dp=None, num_micro_batches=None, micro_batch_size=None)  # fmt: skip
    if free != problem.config.space and _fits(replace(problem, config=replace(problem.config, space=free))):
        pins = ", ".join(_pins(problem.config.space))
        ways.append(f"freeing {pins}")
    more = _nodes_that_fit(problem)
    if more:
        ways.append(f"{more} nodes instead of {problem.cluster.groups[0].count}")
    return InfeasibleError(
        f"memory: model={problem.model.config.name} fits in no {kind} plan on "
        f"cluster={problem.cluster.name}; the lightest plan ({detail}) needs {needed:.2f} GiB of the "
        f"{device.memory / GIB:.2f} GiB of {device.name}; smallest changes that help: {' or '.join(ways)}."
    )


def _pins(space: SpaceConfig) -> list[str]:
    names = (
        "pp",
        "tp",
        "dp",
        "num_micro_batches",
        "micro_batch_size",
        "zero_stage",
        "recompute",
        "sequence_parallel",
    )
    return [f"space.{name}" for name in names if getattr(space, name) is not None]


def _least_excess(tables: Sequence[CostTable], kind: str) -> tuple[float, str, float]:
    """Bytes by which the lightest plan overshoots (negative: it fits), where, and that stage's bytes."""
    best, detail, capacity = float("inf"), "none", 0.0
    for table, plans in zip(tables, lightest_plans(tables, kind), strict=True):
        over = evaluate_batch(table, plans).memory - table.capacity
        excess = over.amax(1)
        index = int(excess.argmin())
        if float(excess[index]) < best:
            best = float(excess[index])
            count = int(table.num_micro_batches[plans.outer[index]])
            detail = f"{table.words}, {count} micro-batches"
            capacity = float(table.capacity[int(over[index].argmax())])
    return best, detail, capacity


def any_fits(problem: Problem, tables: Sequence[CostTable]) -> bool:
    """Whether the lightest plan of some outer choice fits the memory."""
    return _least_excess(tables, problem.config.space.kind)[0] <= 0


def _fits(problem: Problem) -> bool:
    return any_fits(problem, build_tables(problem, outer_spaces(problem)))


def _nodes_that_fit(problem: Problem) -> int | None:
    """Smallest doubling of the first node group with which the lightest plan fits, or None."""
    first = problem.cluster.groups[0]
    for factor in (2, 4, 8, 16, 32):
        groups = (replace(first, count=first.count * factor), *problem.cluster.groups[1:])
        larger = replace(problem, cluster=replace(problem.cluster, groups=groups))
        try:
            if _fits(larger):
                return first.count * factor
        except DartsParallelError:
            continue
    return None
