"""How far rules for the order of passes are from the best order of their own stages, on small pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch

from baselines.min_max_chunks import solve as balance
from darts_parallel.cost.evaluation import evaluate_batch, pass_seconds, table_reading
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.errors import UnsupportedError
from darts_parallel.report.tables import markdown_table
from darts_parallel.schedules import find
from experiments.comparison.schedule_problems import ScheduleCase, small_case

SMALL: tuple[ScheduleCase, ...] = (
    small_case("large vocabulary, 32 layers", pp=4, count=4),
    small_case("hybrid, Nemotron-H 8B", pp=4, count=4),
    small_case("large vocabulary, 32 layers", pp=2, count=3),
    small_case("hybrid, Nemotron-H 8B", pp=2, count=3),
)
MOST_STAGES = 4
"""Stages of all devices up to which the programme is asked."""


@dataclass(frozen=True)
class OrderGap:
    """One schedule of one small problem beside the best order of its passes."""

    problem: str
    schedule: str
    rule: float
    """Seconds of an iteration in the order of the schedule."""
    best: float
    """In the best order that the programme found; infinite: none in time."""
    bound: float
    """No order is faster."""
    seconds: float
    """Spent by the solver at most."""


def order_gaps(case: ScheduleCase, seconds: float) -> list[OrderGap]:
    """Every schedule with balanced chunks, and the best order within the memory that its own order takes.

    Args:
        case: A small problem.
        seconds: Of the solver, for each schedule.

    Errors:
        UnsupportedError: scipy is not installed.
    """
    result = []
    for table in case.tables():
        found = balance([table], "uniform")
        if found.best is not None and table.num_stages <= MOST_STAGES:
            result.append(_gap(case.name, table, found.best.plan, seconds))
    return result


def _gap(name: str, table: CostTable, plan: HardPlans, seconds: float) -> OrderGap:
    try:
        ilp = import_module("baselines.zero_bubble_ilp")
    except ModuleNotFoundError:
        raise UnsupportedError(
            "the best order of passes needs scipy; try pip install 'darts-parallel[rivals]', or "
            "order_seconds=0, which leaves it out."
        ) from None
    passes, reading = pass_seconds(table, plan), table_reading(table, plan)
    passes = passes.blocking() if table.pipeline.blocking else passes
    forward, backward, weight, message = (
        values[0].detach().numpy()
        for values in (passes.forward, passes.backward, passes.weight_gradient, passes.message)
    )
    kept = table.activation[plan.outer[0], torch.arange(table.num_layers), plan.choices[0]]
    held = np.bincount(plan.stages()[0].numpy(), kept.numpy(), minlength=table.num_stages)
    held = held / held.max()
    count, rule = int(table.num_micro_batches[plan.outer[0]]), evaluate_batch(table, plan)
    orders = find(table.pipeline.schedule).orders(table.pp, count, table.virtual_stages)
    once = float(reading.per_iteration[0])
    seconds_of_rule = float(rule.iteration_time[0])
    stages = ilp.FixedStages(
        forward, backward - weight, weight, message, tuple(table.stage_device.tolist()),
        reading.sync[0].numpy(), held, np.array([_most_held(order, held) for order in orders]), count,
    )  # fmt: skip
    best = ilp.best_order(stages, seconds, seconds_of_rule - once)
    return OrderGap(
        name, table.pipeline.schedule, seconds_of_rule, best.seconds + once, best.bound + once, seconds
    )


def _most_held(order: Sequence[tuple[str, int, int]], held: np.ndarray) -> float:
    """The most that a device holds in an order; a schedule that splits no backward frees with it."""
    frees = "W" if any(kind == "W" for kind, _, _ in order) else "B"
    steps = [held[stage] * {"F": 1.0, frees: -1.0}.get(kind, 0.0) for kind, stage, _ in order]
    return float(np.cumsum(steps).max())


def orders_table(gaps: Sequence[OrderGap]) -> str:
    """All schedules as Markdown."""
    header = ("problem", "schedule", "order by rule", "best order found", "proven least", "rule above it")
    lines = []
    for gap in gaps:
        found = f"{gap.best:.4g} s" if np.isfinite(gap.best) else "none in time"
        least = min(gap.best, gap.rule)
        above = f"{100 * (gap.rule / least - 1):.2f} %"
        lines.append((gap.problem, gap.schedule, f"{gap.rule:.4g} s", found, f"{gap.bound:.4g} s", above))
    return "\n".join(markdown_table(header, lines, (0, 1))) + "\n"
