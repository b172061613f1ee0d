"""Choose, among plans that cost about the same, one with few strategies.

The model cannot tell seconds apart that differ by far more than `TIE`; whoever starts a plan can tell one
strategy from four.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from darts_parallel.cost import CostTable, HardPlans, evaluate_batch, even_uniform_plans, hard_plan
from darts_parallel.errors import PlanError
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

TIE = 0.001
"""Relative seconds that fewer strategies may cost, and more even stages after them: 0.2 % in all."""
NEIGHBOURS = 3
"""Plans of one strategy next to the chosen one, with its stages and micro-batches."""


def simplest(plan: Plan, others: Sequence[Plan], problem: Problem) -> Plan:
    """Return the plan of fewest strategies, of those the fastest, within `TIE` of a plan.

    Strategies of a plan are replaced by others of its own, all layers of one at once.

    Args:
        plan: It must fit.
        others: Further plans that may be as fast.
    """
    limit = float(hard_plan(plan, problem)[2].iteration_time[0]) * (1.0 + TIE)
    found = [
        _merged(own, problem, limit) for own in (plan, *others) if _within(own, problem, limit)
    ]
    return min(
        found, key=lambda own: (len(set(own.layers)), hard_plan(own, problem)[2].iteration_time[0])
    )


def _within(plan: Plan, problem: Problem, limit: float) -> bool:
    try:
        cost = hard_plan(plan, problem)[2]
    except PlanError:  # a stage may not begin everywhere
        return False
    fits = bool(cost.feasible[0]) and plan.within(problem.config.space.kind)
    return fits and float(cost.iteration_time[0]) <= limit


def _merged(plan: Plan, problem: Problem, limit: float) -> Plan:
    """Return the plan with as few of its strategies as the limit of seconds allows, by the cheapest steps."""
    table, hard, _ = hard_plan(plan, problem)
    if plan.offload:
        return plan
    while True:
        used = torch.unique(hard.choices)
        pairs = [(old, new) for old in used for new in used if old != new]
        rows = [torch.where(hard.choices == old, new, hard.choices) for old, new in pairs]
        if not rows:
            break
        count = len(rows)
        changed = HardPlans(
            hard.outer.expand(count), torch.cat(rows), hard.first_layers.expand(count, -1)
        )
        cost = evaluate_batch(table, changed)
        seconds = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        best = int(seconds.argmin())
        if float(seconds[best]) > limit:
            break
        hard = changed[best : best + 1]
    return replace(plan, layers=hard.to_plan(0, table).layers)


def neighbours(plan: Plan, tables: Sequence[CostTable]) -> Iterator[tuple[float, Plan]]:
    """Yield the fastest even plans of one strategy that differ in degrees alone, with their seconds."""
    mine = (plan.pp, plan.cp, plan.node_order, plan.virtual_stages)
    degrees = (
        {(layer.dp, layer.tp) for layer in plan.layers[1:2]}
        if len(set(plan.layers)) == 1
        else set()
    )
    for table in tables:
        if (table.pp, table.cp, table.node_order, table.virtual_stages) != mine or table.host:
            continue
        outer = (table.num_micro_batches == plan.num_micro_batches).nonzero().flatten().tolist()
        plans = even_uniform_plans(table)
        plans = plans[torch.isin(plans.outer, torch.tensor(outer, dtype=torch.long))]
        cost = evaluate_batch(table, plans)
        seconds = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        for row in seconds.argsort(stable=True).tolist():
            layer = table.choices[int(plans.choices[row, 0])]
            if float(seconds[row]) == float("inf") or (layer.dp, layer.tp) in degrees:
                continue
            degrees.add((layer.dp, layer.tp))
            other = plans.to_plan(row, table)
            if other.schedule_name == plan.schedule_name:
                yield float(seconds[row]), other


def with_one_end(plan: Plan, others: Sequence[Plan], problem: Problem) -> Plan:
    """Return the plan whose embedding, head and loss share a strategy, where its trainer wants that.

    Of the plan's own strategies the one with which it is fastest, or the fastest of others that have one.
    """
    name = problem.config.space.trainer
    if name is None or problem.config.abilities(name).whole_ends != "always":
        return plan
    pairs = [*zip(problem.model.layers, plan.layers, strict=True)]
    plans = [
        replace(plan, layers=tuple(layer if spec.recomputable else own for spec, layer in pairs))
        for own in dict.fromkeys(plan.layers)
    ]
    fitting = [own for own in (*plans, *others) if _within(own, problem, float("inf"))]
    return min(
        fitting, key=lambda own: float(hard_plan(own, problem)[2].iteration_time[0]), default=plan
    )
