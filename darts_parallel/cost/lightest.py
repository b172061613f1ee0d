"""The plans that need the least memory."""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.hard_plans import HardPlans, unit_starts
from darts_parallel.cost.host_memory import without_offloadable_memory
from darts_parallel.cost.pipeline import summed
from darts_parallel.cost.stage_costs import kept_bytes

BISECTIONS = 30


def lightest_plans(tables: Sequence[CostTable], space_kind: str) -> list[HardPlans]:
    """Return for every outer choice a plan of nearly the smallest peak memory.

    Layer-wise, each layer takes its lightest strategy for the stage it lies in; otherwise all layers
    share the strategy that is lightest in sum, and stage-wise also those of a stage alone: two plans then.
    Stages are filled to an equal share of their capacity, found by bisection.
    """
    kinds = ("uniform", "stagewise") if space_kind == "stagewise" else (space_kind,)
    free = [without_offloadable_memory(table) for table in tables]
    return [HardPlans.concatenate([_lightest(table, kind) for kind in kinds]) for table in free]


def _lightest(table: CostTable, space_kind: str) -> HardPlans:
    units = unit_starts(table.fused_to_previous)
    plans = []
    for outer in range(table.num_outer):
        if not table.allowed[outer].any():
            continue
        in_flight = table.in_flight[outer].view(-1, 1, 1)
        need = kept_bytes(table.static[outer], table.activation[outer], in_flight)
        need = need + table.working[outer] / 2
        legal = table.runnable.all(0, keepdim=True) if space_kind == "uniform" else table.runnable
        need = need.masked_fill(~(table.allowed[outer] & legal).unsqueeze(1), torch.inf)
        size, choice = need.min(-1)
        if space_kind != "layerwise":
            sums = need.sum(1, keepdim=True)
            shared = (sums.sum(0, keepdim=True) if space_kind == "uniform" else sums).argmin(-1)
            choice = shared.expand_as(choice)
            size = need.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        starts = units[_fill(_unit_sums(size, table), table.stage_capacity)]
        stages = torch.searchsorted(starts, torch.arange(table.num_layers), right=True) - 1
        chosen = choice[stages, torch.arange(table.num_layers)]
        plans.append(HardPlans(torch.tensor([outer]), chosen.unsqueeze(0), starts.unsqueeze(0)))
    return HardPlans.concatenate(plans)


def _unit_sums(size: torch.Tensor, table: CostTable) -> torch.Tensor:
    """Return the bytes of units from bytes of layers, `(K, L)` to `(K, U)`."""
    unit = (~table.fused_to_previous).cumsum(0) - 1
    return summed(size, unit.expand_as(size), int(unit.max()) + 1)


def _fill(size: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    """Return the stage starts that fill every stage to about the same share of its capacity."""
    pp, units = size.shape
    prefix = torch.nn.functional.pad(size.cumsum(1), (1, 0)).tolist()
    room = capacity.abs().clamp(min=1.0).tolist()
    low, high = 0.0, max(row[-1] / own for row, own in zip(prefix, room, strict=True))
    starts = list(range(pp))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        position, trial = 0, []
        for k in range(pp):
            trial.append(position)
            furthest = bisect_right(prefix[k], prefix[k][position] + middle * room[k]) - 1
            position = min(max(furthest, position), units - (pp - 1 - k))
            if position == trial[-1]:
                break
        if len(trial) == pp and position == units and trial[-1] < units:
            high, starts = middle, trial
        else:
            low = middle
    return torch.tensor(starts)
