"""What can be said of a plan whose pipeline is simulated.

Exact planners rest on the closed form: a sum and a maximum over stages. The longest path through a
schedule has no such form, so only spaces that can be priced plan by plan are proven; elsewhere the plan
that is optimal by the closed form is priced by the simulation, and only a lower bound is proven
(`darts_parallel.exact.schedule_bounds`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb

from darts_parallel.config.schema import CostConfig
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.result import OFFLOADING, PlannerResult, TableResult
from darts_parallel.exact.schedule_bounds import simulated_lower_bound
from darts_parallel.problem.problem import Problem

LIMIT = 20_000
"""Plans that are priced one by one; about a second."""


def find_plan(
    problem: Problem,
    space_kind: str,
    exact: Callable[[Problem], PlannerResult],
    *,
    tables: Sequence[CostTable] | None = None,
    deadline: float = float("inf"),
) -> PlannerResult:
    """The optimal plan of a small space, or the closed form's optimum priced by the simulation.

    Args:
        problem: With `cost.pipeline=simulated`.
        space_kind: `uniform`, `stagewise` or `layerwise`.
        exact: A planner that is exact by the closed form.
        tables: Of the whole space; None builds them.
        deadline: `time.monotonic()` after which bounds are not improved any more.
    """
    begin = time.monotonic()
    tables = build_tables(problem) if tables is None else tables
    if any(table.offload for table in tables):
        floor = simulated_lower_bound(tables, space_kind, deadline=deadline)
        result = TableResult(None, floor, False, 0, note=OFFLOADING)
        return result.to_baseline(tables, time.monotonic() - begin)
    if number_of_plans(tables, space_kind) <= LIMIT:
        result = brute_force(tables, space_kind)
        return result.to_baseline(tables, time.monotonic() - begin, "every plan was simulated")
    # the closed form knows the usual schedules alone
    usual = replace(problem.config.space, schedules=None)
    config = replace(problem.config, cost=CostConfig(), space=usual)
    answer = exact(Problem.from_config(config))
    named = problem.config.space.schedules
    known = answer.plan is not None and (named is None or answer.plan.schedule_name in named)
    cost = evaluate(answer.plan, problem) if known and answer.plan is not None else None
    fits = cost is not None and cost.feasible
    return PlannerResult(
        plan=answer.plan if fits else None,
        iteration_time_s=cost.iteration_time_s if cost is not None and fits else float("inf"),
        seconds=time.monotonic() - begin,
        plans_evaluated=answer.plans_evaluated,
        proven=False,
        lower_bound_s=simulated_lower_bound(
            tables,
            space_kind,
            known=cost.iteration_time_s if cost is not None and fits else float("inf"),
            deadline=deadline,
        ),
        note="its plan is the best by the closed form, priced by the simulation; only the bound is proven"
        if fits
        else "the best plan by the closed form does not fit these schedules; only the bound is proven",
    )


def number_of_plans(tables: Sequence[CostTable], space_kind: str) -> int:
    """Plans of a space: splits times assignments of strategies."""
    total = 0
    for table in tables:
        slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
        cuts = int((~table.fused_to_previous[1:]).sum())
        choices = sum(int(row.sum()) ** slots for row in table.allowed)
        total += comb(cuts, table.num_stages - 1) * choices
    return total
