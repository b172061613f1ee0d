"""The schedule of one iteration of a plan, pass by pass."""

from dataclasses import dataclass

import torch

from darts_parallel.cost import (
    Event,
    hard_plan,
    pass_seconds,
    timeline,
)
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.schedules import find

CATEGORIES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True)
class Timeline:
    """One iteration of one plan."""

    schedule: str
    events: tuple[Event, ...]
    """Every pass, in an order that respects all dependencies; a shorter critical one would shorten the
    iteration."""
    pipeline_ends_s: tuple[float, ...]
    """Seconds from the start until each device has ended its last pass."""
    sync_s: tuple[float, ...]
    """Gradient synchronisation and optimizer of each device, after its last pass."""


def plan_timeline(plan: Plan, problem: Problem) -> Timeline:
    """Simulate one iteration of `plan`, whatever `cost.pipeline` says, with its schedule and messages."""
    table, hard, cost = hard_plan(plan, problem)
    model = table.pipeline
    sync = cost.sync_seconds[0]
    passes = pass_seconds(table, hard)
    passes = passes.blocking() if model.blocking else passes
    with torch.no_grad():
        events = timeline(passes, model.schedule, sync, plan.num_micro_batches)
    ends = [0.0] * plan.pp
    for event in events:
        ends[event.device] = max(ends[event.device], event.end)
    name = find(model.schedule).name
    return Timeline(name, tuple(events), tuple(ends), tuple(sync.tolist()))
