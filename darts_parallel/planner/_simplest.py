"""Choose, among plans that cost about the same, one with few strategies.

The model cannot tell seconds apart that differ by far more than `search.tie`; whoever starts a plan
can tell one strategy from four.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import torch

from darts_parallel.config import NEWEST
from darts_parallel.cost import (
    GAIN_TOLERANCE,
    CostTable,
    HardPlans,
    Tables,
    evaluate_batch,
    even_uniform_plans,
    fastest,
    flatnonzero,
    hard_plan,
)
from darts_parallel.errors import PlanError
from darts_parallel.exact import unknown_costs
from darts_parallel.gradient import round_counts
from darts_parallel.planner._session import Asked, NamedPlan
from darts_parallel.planner.some_blocks import even_cuts
from darts_parallel.plans import Plan, job_facts, trainer_runs_plan

TIE = 0.001
"""Relative seconds that more even stages may cost, after `search.tie`."""
NEIGHBOURS = 3
"""Plans of one strategy next to the chosen one, with its stages and micro-batches."""


def _within(plans: Iterable[Plan], asked: Asked, limit: float = inf) -> Iterator[Plan]:
    """Yield the plans of the space that fit and take at most so many seconds."""
    for plan in plans:
        try:
            cost = hard_plan(plan, asked.problem)[2]
        except PlanError:  # a stage may not begin everywhere
            continue
        fits = bool(cost.feasible[0]) and plan.within(asked.space_kind)
        if fits and float(cost.iteration_time[0]) <= limit:
            yield plan


def _merged(
    plan: Plan,
    asked: Asked,
    limit: float,
) -> Plan:
    """Return the plan with as few of its strategies as the limit of seconds allows, by the cheapest steps."""
    if plan.offload:
        return plan
    table, hard, _ = hard_plan(plan, asked.problem)
    while changed := _with_one_strategy_less(hard):
        found = fastest(0, table, changed)
        if found.time > limit:
            break
        hard = found.plan
    return replace(plan, layers=hard.to_plan(0, table).layers)


def _with_one_strategy_less(hard: HardPlans) -> HardPlans | None:
    """Return a plan with every strategy replaced by every other one that it has; None where it has one."""
    used = torch.unique(hard.choices)
    rows = [
        torch.where(hard.choices == old, new, hard.choices)
        for old in used
        for new in used
        if old != new
    ]
    if not rows:
        return None
    return replace(hard.repeated(len(rows)), choices=torch.cat(rows))


def recomputed_first(plan: Plan, asked: Asked) -> Plan:
    """Return the plan with recomputed layers first in every stage, where that costs no seconds.

    Equal layers of a stage exchange their strategies.
    """
    if plan.offload:
        return plan
    table, hard, cost = hard_plan(plan, asked.problem)
    chosen = torch.nn.functional.one_hot(hard.choices, len(table.choices)).double()
    ordered = round_counts(chosen, hard, table)
    seconds = float(evaluate_batch(table, ordered).fitting_seconds[0])
    if seconds > float(cost.iteration_time[0]) * (1.0 + GAIN_TOLERANCE):
        return plan
    return replace(plan, layers=ordered.to_plan(0, table).layers)


def simplest_within(
    plans: Sequence[Plan],
    asked: Asked,
    limit: float,
) -> Plan:
    """Return the plan that is easiest to run, of some plans and of their merged forms.

    More trainers that run its strategies come first, then a lower ZeRO stage, fewer strategies,
    fewer different stage sizes, and fewer seconds.

    Args:
        plans: Plans that fit, the chosen one first.
        limit: Seconds that it may take.
    """
    as_fast = list(_within(plans, asked, limit)) or list(plans[:1])
    merged = [_merged(own, asked, limit) for own in as_fast]
    alike = list(dict.fromkeys([*as_fast, *merged]))
    evened = [even for own in alike for even in _evened(own, asked)]
    alike += _within(evened, asked, limit)
    return min(alike, key=lambda own: (*effort(own, asked), asked.seconds(own)))


def _evened(plan: Plan, asked: Asked) -> Iterator[Plan]:
    """Yield a plan with stages, or chunks, of equal numbers of layers, the ends aside or not."""
    if len(plan.boundaries) == 2 or plan.offload:
        return
    table = hard_plan(plan, asked.problem)[0]
    for starts in even_cuts(table):
        yield replace(plan, boundaries=(*starts.tolist(), len(plan.layers)))


def effort(plan: Plan, asked: Asked) -> tuple[int, int, int, int]:
    """Return what makes a plan hard to run, the weightiest first."""
    problem = asked.problem
    strategies = set(plan.layers)
    job = job_facts(problem.model, problem.training, problem.software)
    abilities = map(problem.config.abilities, NEWEST)
    trainers = sum(trainer_runs_plan(rules, job, problem.model, plan) for rules in abilities)
    zero = max(own.zero_stage for own in strategies)
    sizes = {end - first for first, end in pairwise(plan.boundaries)}
    return -trainers, zero, len(strategies), len(sizes)


def neighbours(plan: Plan, tables: Tables) -> Iterator[NamedPlan]:
    """Yield the fastest even plans of one strategy that differ in degrees alone, with their seconds."""
    degrees = set()
    if len(set(plan.layers)) == 1:
        first = plan.layers[0]
        degrees.add((first.dp, first.tp))
    for table in tables:
        if _has_pipeline_of(plan, table):
            yield from _of_other_degrees(plan, table, degrees)


def _has_pipeline_of(plan: Plan, table: CostTable) -> bool:
    """Return whether a table holds plans with the stages and the order of nodes of a plan."""
    if unknown_costs([table]):
        return False
    return (
        plan.pp == table.pp
        and plan.cp == table.cp
        and plan.node_order == table.node_order
        and plan.virtual_stages == table.virtual_stages
    )


def _of_other_degrees(
    plan: Plan, table: CostTable, degrees: set[tuple[int, int]]
) -> Iterator[NamedPlan]:
    """Yield the fastest even plan of a table for every dp and tp that is not in `degrees`, and add these."""
    outer = flatnonzero(table.num_micro_batches == plan.num_micro_batches)
    plans = even_uniform_plans(table)
    plans = plans[torch.isin(plans.outer, outer)]
    seconds = evaluate_batch(table, plans).fitting_seconds
    for row in seconds.argsort(stable=True).tolist():
        layer = table.choices[int(plans.choices[row, 0])]
        own = (layer.dp, layer.tp)
        if torch.isinf(seconds[row]) or own in degrees:
            continue
        degrees.add(own)
        other = plans.to_plan(row, table)
        if other.schedule_name == plan.schedule_name:
            yield float(seconds[row]), other


def with_one_end(
    plan: Plan,
    others: Sequence[Plan],
    asked: Asked,
) -> Plan:
    """Return the plan whose embedding, head and loss share a strategy, where its trainer wants that.

    It is the fastest with one of the plan's own strategies at both ends, or the fastest of the
    others.
    """
    if asked.problem.config.rules.whole_ends != "always":
        return plan
    candidates = []
    for end in dict.fromkeys(plan.layers):
        pairs = zip(asked.problem.model.layers, plan.layers, strict=True)
        layers = tuple(own if layer.recomputable else end for layer, own in pairs)
        candidates.append(replace(plan, layers=layers))
    fitting = _within((*candidates, *others), asked)
    return min(fitting, key=asked.seconds, default=plan)
