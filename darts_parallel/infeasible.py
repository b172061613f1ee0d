"""The plans that need the least memory, and what to say when even they do not fit."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from darts_parallel.candidates import Candidate
from darts_parallel.cluster import GIB
from darts_parallel.config import SpaceConfig
from darts_parallel.cost import HardPlans, evaluate_batch
from darts_parallel.discretize import unit_starts
from darts_parallel.errors import InfeasibleError
from darts_parallel.problem import Problem
from darts_parallel.space import outer_spaces
from darts_parallel.table import CostTable, build_tables

BISECTIONS = 30


def lightest_plans(tables: Sequence[CostTable], kind: str) -> list[Candidate]:
    """For every outer choice a plan of nearly the smallest peak memory.

    Layer-wise, each layer takes its lightest strategy for the stage it lies in; otherwise all layers
    share the strategy that is lightest in sum. Stages are filled to an equal share of their capacity,
    found by bisection.
    """
    return [Candidate(index, _lightest(table, kind)) for index, table in enumerate(tables)]


def _lightest(table: CostTable, kind: str) -> HardPlans:
    units = unit_starts(table.joined)
    plans = []
    for outer in range(table.num_outer):
        if not table.allowed[outer].any():
            continue
        flight = table.in_flight[outer].view(-1, 1, 1)
        need = table.static[outer] + flight * table.activation[outer] + table.working[outer] / 2
        legal = table.runs(
            table.stage_kind.unsqueeze(1), torch.arange(len(table.choices)).expand(table.num_stages, -1)
        )
        legal = legal if kind == "layerwise" else legal.all(0, keepdim=True)
        need = need.masked_fill(~(table.allowed[outer] & legal).unsqueeze(1), torch.inf)
        if kind != "layerwise":
            shared = need.sum((0, 1)).argmin()
            need = need[:, :, shared : shared + 1]
        size, choice = need.min(-1)
        if kind != "layerwise":
            choice = torch.full_like(choice, int(shared))
        starts = units[_fill(_unit_sums(size, table), table.stage_capacity)]
        stages = torch.searchsorted(starts, torch.arange(table.num_layers), right=True) - 1
        chosen = choice[stages, torch.arange(table.num_layers)]
        plans.append(HardPlans(torch.tensor([outer]), chosen.unsqueeze(0), starts.unsqueeze(0)))
    return HardPlans.concatenate(plans)


def _unit_sums(size: torch.Tensor, table: CostTable) -> torch.Tensor:
    """Bytes of units from bytes of layers, `(K, L)` to `(K, U)`."""
    unit = torch.searchsorted(unit_starts(table.joined), torch.arange(table.num_layers), right=True) - 1
    result = torch.zeros(len(size), int(unit.max()) + 1, dtype=size.dtype)
    return result.scatter_add(1, unit.expand_as(size), size)


def _fill(size: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    """Stage starts that fill every stage to about the same share of its capacity."""
    pp, units = size.shape
    prefix = torch.nn.functional.pad(size.cumsum(1), (1, 0))
    low, high = 0.0, float((prefix[:, -1] / capacity.abs().clamp(min=1.0)).max())
    starts = list(range(pp))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        position, trial = 0, []
        for k in range(pp):
            trial.append(position)
            reach = prefix[k, position] + middle * capacity[k].abs().clamp(min=1.0)
            furthest = int(torch.searchsorted(prefix[k], reach, right=True)) - 1
            position = min(max(furthest, position), units - (pp - 1 - k))
            if position == trial[-1]:
                break
        if len(trial) == pp and position == units and trial[-1] < units:
            high, starts = middle, trial
        else:
            low = middle
    return torch.tensor(starts)


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
    for candidate in lightest_plans(tables, kind):
        table = tables[candidate.table]
        over = evaluate_batch(table, candidate.plans).memory - table.capacity
        excess = over.amax(1)
        index = int(excess.argmin())
        if float(excess[index]) < best:
            best = float(excess[index])
            count = int(table.num_micro_batches[candidate.plans.outer[index]])
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
    from darts_parallel.errors import DartsParallelError

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
