"""Relaxed plans to hard ones: argmax strategies, rounded edges, and a repair of what does not fit."""

from dataclasses import replace

import torch
from torch import Tensor

from darts_parallel.cost.evaluation import BatchCost, evaluate_batch, table_reading
from darts_parallel.cost.hard_plans import HardPlans, round_edges, unit_starts
from darts_parallel.cost.table import CostTable


def harden(choice_weights: Tensor, edges: Tensor, table: CostTable) -> HardPlans:
    """The argmax plan of every relaxed plan.

    Args:
        choice_weights: Shape `(O, R, L, C)`.
        edges: Inner stage edges in units, shape `(O, R, K - 1)`.

    Returns:
        O * R plans, outer choice by outer choice.
    """
    outer, restarts = choice_weights.shape[:2]
    units = unit_starts(table.fused_to_previous)
    starts = units[round_edges(edges.reshape(outer * restarts, -1), len(units))]
    return HardPlans(
        outer=torch.arange(outer).repeat_interleave(restarts),
        choices=choice_weights.argmax(-1).reshape(outer * restarts, -1),
        first_layers=starts,
    )


def repair(table: CostTable, plans: HardPlans, limit: float) -> tuple[HardPlans, BatchCost]:
    """Make plans fit: exchange strategies in overfull stages, the cheapest seconds per byte first.

    Each round exchanges one layer of every overfull stage. A plan that cannot be saved stays
    infeasible, and one that grows slower than `limit` seconds is given up.
    """
    cost = evaluate_batch(table, plans)
    for _ in range(table.num_layers):
        over = cost.memory - table.capacity
        broken = (over > 0).any(1) & (cost.iteration_time < limit)
        index = torch.nonzero(broken).squeeze(1)
        exchanged, changed = _exchange(table, plans[index], over[index])
        if not changed.any():
            break
        choices = plans.choices.clone()
        choices[index] = exchanged
        plans = HardPlans(plans.outer, choices, plans.first_layers)
        if table.pipeline.simulated:
            # seconds are worth a simulation at the end alone
            cost = replace(cost, memory=table_reading(table, plans).memory)
        else:
            cost = evaluate_batch(table, plans)
    return plans, evaluate_batch(table, plans) if table.pipeline.simulated else cost


def _exchange(table: CostTable, plans: HardPlans, over: Tensor) -> tuple[Tensor, Tensor]:
    """One exchange in every overfull stage: new choices `(B, L)`, and whether a plan changed `(B,)`."""
    stages, outer = plans.stages(), plans.outer
    current = plans.choices.unsqueeze(-1)
    in_flight = table.in_flight[outer.unsqueeze(1), stages].unsqueeze(-1)
    memory = table.static[outer] + in_flight * table.activation[outer] + table.working[outer]
    kinds = table.stage_kind[stages]
    layers = torch.arange(table.num_layers)
    count = table.num_micro_batches[outer].view(-1, 1, 1)
    seconds = (
        count * table.time[outer.unsqueeze(1), kinds, layers] + table.sync[outer.unsqueeze(1), kinds, layers]
    )
    devices = table.stage_device[stages]
    saved = memory.gather(-1, current) - memory
    loss = (seconds - seconds.gather(-1, current)).clamp(min=1e-12)
    same = table.layout[plans.choices].unsqueeze(-1) == table.layout
    need = over.gather(1, devices).unsqueeze(-1)
    legal = table.allowed[outer].unsqueeze(1) & (saved > 0) & (need > 0)
    legal &= table.runs(kinds.unsqueeze(-1), torch.arange(len(table.choices)).expand_as(legal))
    # a change of layout also costs resharding: only where nothing else helps
    gain = torch.minimum(saved, need) / loss * torch.where(same, 1.0, 1e-3)
    gain = torch.where(legal, gain, -1.0)
    best, choice = gain.max(-1)
    result = plans.choices.clone()
    for device in range(table.pp):
        candidates = torch.where(devices == device, best, -1.0)
        value, layer = candidates.max(1)
        row = torch.nonzero(value > 0).squeeze(1)
        result[row, layer[row]] = choice[row, layer[row]]
    return result, (result != plans.choices).any(1)
