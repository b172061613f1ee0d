"""Proofs and bounds for plans whose pipeline is simulated.

Exact planners rest on the closed form: a sum and a maximum over stages. The longest path through a
schedule has no such form, so only spaces that can be priced plan by plan are proven; elsewhere the plan
that is optimal by the closed form is priced by the simulation, and only a lower bound is proven
(`darts_parallel.exact.schedule_bounds`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb, inf, isfinite

from darts_parallel.cost import CostTable
from darts_parallel.exact._enumeration import brute_force
from darts_parallel.exact.result import OFFLOADING, TableResult, Verification
from darts_parallel.exact.schedule_bounds import simulated_lower_bound
from darts_parallel.plan import Plan

MAX_PRICED_PLANS = 20_000
"""Plans that are priced one by one; about a second."""


def find_simulated_plan(
    tables: Sequence[CostTable],
    space_kind: str,
    closed_form: Callable[[], Plan | None],
    price: Callable[[Plan], float],
    *,
    deadline: float = inf,
) -> Verification:
    """Find the optimal plan of a small space, or price the closed form's optimum by the simulation.

    Args:
        tables: Simulated, of the whole space.
        space_kind: `uniform`, `stagewise` or `layerwise`.
        closed_form: Returns the plan that is optimal by the closed form.
        price: Returns the simulated seconds of a plan; infinite where it does not fit or is not in the space.
        deadline: `time.monotonic()` after which bounds are not improved any more.
    """
    if any(table.offload for table in tables):
        floor = simulated_lower_bound(tables, space_kind, deadline=deadline)
        return TableResult(None, floor, False, 0, note=OFFLOADING).verification(tables, 0.0)
    if number_of_plans(tables, space_kind) <= MAX_PRICED_PLANS:
        answer = replace(brute_force(tables, space_kind), note="every plan was simulated")
        if any(table.pipeline.free for table in tables):
            note = "every plan was simulated by the rules alone, not by other orders of passes"
            floor = simulated_lower_bound(tables, space_kind, known=answer.cost, deadline=deadline)
            answer = replace(answer, proven=False, lower_bound=floor, note=note)
        return answer.verification(tables, 0.0)
    plan = closed_form()
    seconds = inf if plan is None else price(plan)
    floor = simulated_lower_bound(tables, space_kind, known=seconds, deadline=deadline)
    priced = "its plan is the best by the closed form, priced by the simulation"
    missing = "the best plan by the closed form does not fit these schedules"
    note = f"{priced if isfinite(seconds) else missing}; only the bound is proven"
    answer = TableResult(None, floor, False, 0, note=note)
    entry = answer.verification(tables, 0.0)
    return replace(entry, plan=plan if isfinite(seconds) else None, iteration_time_s=seconds)


def number_of_plans(tables: Sequence[CostTable], space_kind: str) -> int:
    """Count the plans of a space: splits times assignments of strategies."""
    total = 0
    for table in tables:
        slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
        cuts = int((~table.fused_to_previous[1:]).sum())
        choices = sum(int(row.sum()) ** slots for row in table.allowed)
        total += comb(cuts, table.num_stages - 1) * choices
    return total
