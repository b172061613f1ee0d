"""The schedule of one iteration of a plan, pass by pass, and its export as a trace.

The trace is the JSON of the Trace Event Format (Google, "Trace Event Format", complete events of phase
`X`), which chrome://tracing and ui.perfetto.dev open.
"""

from dataclasses import dataclass
from typing import Any

import torch

from darts_parallel.cost import Event, PassSeconds, critical_operations, hard_plan, pass_seconds, timeline
from darts_parallel.plan import Plan
from darts_parallel.problem import Problem
from darts_parallel.schedules import Operation, find

CATEGORIES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Timeline:
    """One iteration of one plan."""

    schedule: str
    events: tuple[Event, ...]
    """Every pass, in an order that respects all dependencies."""
    passes: PassSeconds
    """Seconds of one micro-batch by stage, of this one plan; blocking messages are inside the passes."""
    critical: frozenset[Operation]
    """The passes of one longest path: a shorter one of them would shorten the iteration."""
    pipeline_ends_s: tuple[float, ...]
    """Seconds from the start until each device has ended its last pass."""
    sync_s: tuple[float, ...]
    """Gradient synchronisation and optimizer of each device, after its last pass."""


def plan_timeline(plan: Plan, problem: Problem) -> Timeline:
    """Simulate one iteration of `plan`, whatever `cost.pipeline` says, with its schedule and messages.

    Args:
        plan: A plan of this problem.
        problem: Model, cluster, job and cost model.
    """
    table, hard, cost = hard_plan(plan, problem)
    model = table.pipeline
    passes = pass_seconds(table, hard)
    passes = passes.blocking() if model.blocking else passes
    with torch.no_grad():
        job = (passes, model.schedule, plan.pp, plan.num_micro_batches)
        events, critical = timeline(*job), critical_operations(*job, cost.sync_seconds[0])
    ends = [0.0] * plan.pp
    for event in events:
        ends[event.device] = max(ends[event.device], event.end)
    sync = tuple(cost.sync_seconds[0].tolist())
    return Timeline(find(model.schedule).name, tuple(events), passes, critical, tuple(ends), sync)


def trace_dict(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return one iteration as a trace: a process for each stage of devices, times in microseconds.

    Args:
        plan: A plan of this problem.
        problem: Model, cluster, job and cost model.
    """
    shown = plan_timeline(plan, problem)
    size = problem.cluster.num_devices // plan.pp
    events: list[dict[str, Any]] = []
    for device in range(plan.pp):
        ranks = f"{device * size}-{(device + 1) * size - 1}" if size > 1 else str(device)
        events.append({"name": "process_name", "ph": "M", "pid": device, "tid": 0,
                       "args": {"name": f"stage {device}, ranks {ranks}"}})  # fmt: skip
        events.append({"name": "process_sort_index", "ph": "M", "pid": device, "tid": 0,
                       "args": {"sort_index": device}})  # fmt: skip
    for event in shown.events:
        kind, stage, batch = event.operation
        span = _span(f"{kind}{batch}", CATEGORIES[kind], event.device, event.start, event.end - event.start)
        critical = event.operation in shown.critical
        events.append(span | {"args": {"stage": stage, "micro_batch": batch, "critical": critical}})
    for device, (end, seconds) in enumerate(zip(shown.pipeline_ends_s, shown.sync_s, strict=True)):
        if seconds > 0:
            events.append(_span("gradient sync, optimizer", "synchronisation", device, end, seconds))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": problem.model.config.name,
            "cluster": problem.cluster.name,
            "plan": plan.describe(problem.training.global_batch_size),
            "schedule": shown.schedule,
        },
    }


def _span(name: str, category: str, device: int, start: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "pid": device, "tid": 0,
            "ts": start * MICROSECONDS, "dur": seconds * MICROSECONDS}  # fmt: skip
