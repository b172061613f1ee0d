"""Exact event simulation of the non-interleaved 1F1B pipeline schedule.

PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473): stage k runs `min(pp - k - 1, m)` forwards
to warm up, then one forward and one backward in turn, then the backwards that are left. A forward
waits for the stage before, a backward for the stage after.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from darts_parallel.cost import CostBreakdown
from darts_parallel.problem import Problem
from darts_parallel.strategy import Plan
from darts_parallel.table import build_table, plan_space


class Event(NamedTuple):
    """One pass of one micro-batch through one stage; seconds from the start of the iteration."""

    stage: int
    kind: str
    """`F` or `B`."""
    micro_batch: int
    start: float
    end: float


def schedule_1f1b(stage_seconds: Sequence[tuple[float, float]], num_micro_batches: int) -> list[Event]:
    """Simulate one iteration of 1F1B.

    Args:
        stage_seconds: Forward and backward seconds of one micro-batch, by stage.
        num_micro_batches: At least 1.

    Returns:
        All `2 * pp * num_micro_batches` events, in an order that respects every dependency.
    """
    pp, end = len(stage_seconds), dict[tuple[str, int, int], float]()
    waiting = [_stage_order(stage, pp, num_micro_batches) for stage in range(pp)]
    ahead = [next(order, None) for order in waiting]
    free = [0.0] * pp
    events: list[Event] = []
    while any(item is not None for item in ahead):
        for stage in range(pp):
            # run this stage until it must wait for a neighbour
            while (item := ahead[stage]) is not None:
                kind, batch = item
                ready = _ready(kind, batch, stage, pp, end)
                if ready is None:
                    break
                start = max(free[stage], ready)
                free[stage] = start + stage_seconds[stage][kind == "B"]
                end[kind, stage, batch] = free[stage]
                events.append(Event(stage, kind, batch, start, free[stage]))
                ahead[stage] = next(waiting[stage], None)
    return events


def _stage_order(stage: int, pp: int, num_micro_batches: int) -> Iterator[tuple[str, int]]:
    """Kind and micro-batch of the passes of one stage, in the order in which it runs them."""
    warm_up = min(pp - stage - 1, num_micro_batches)
    for batch in range(warm_up):
        yield "F", batch
    for batch in range(num_micro_batches - warm_up):
        yield "F", warm_up + batch
        yield "B", batch
    for batch in range(num_micro_batches - warm_up, num_micro_batches):
        yield "B", batch


def _ready(
    kind: str, batch: int, stage: int, pp: int, end: dict[tuple[str, int, int], float]
) -> float | None:
    """When the input of a pass is there; None while it is not known yet."""
    if kind == "F":
        return 0.0 if stage == 0 else end.get(("F", stage - 1, batch))
    return end.get(("F", stage, batch)) if stage == pp - 1 else end.get(("B", stage + 1, batch))


def makespan(events: Sequence[Event]) -> float:
    """Seconds until the last event ends."""
    return max(event.end for event in events)


def forward_backward_seconds(plan: Plan, cost: CostBreakdown, problem: Problem) -> list[tuple[float, float]]:
    """Forward and backward seconds of one micro-batch, by stage; each pair sums to `cost.stage_times_s`.

    Resharding and point-to-point messages go both ways and are split evenly.
    """
    table = build_table(problem, plan_space(problem, plan.pp, plan.num_micro_batches, plan.layers))
    index = {choice: c for c, choice in enumerate(table.choices)}
    stages = torch.tensor(plan.stage_of_layer)
    kinds, layers = table.stage_kind[stages], torch.arange(len(plan.layers))
    choices = torch.tensor([index[layer] for layer in plan.layers])
    zeros = torch.zeros(plan.pp, dtype=torch.float64)
    forward = zeros.scatter_add(0, stages, table.forward[0, kinds, layers, choices].double())
    layer_total = zeros.scatter_add(0, stages, table.time[0, kinds, layers, choices].double())
    total = torch.tensor(cost.stage_times_s, dtype=torch.float64)
    forward = forward + (total - layer_total).clamp(min=0.0) / 2.0
    return list(zip(forward.tolist(), (total - forward).tolist(), strict=True))
