"""Proofs and bounds for plans whose pipeline is simulated.

Exact planners rest on the closed form: a sum and a maximum over stages. The longest path through a
schedule has no such form, so only spaces that can be priced plan by plan are proven; elsewhere the plan
that is optimal by the closed form is priced by the simulation, and only a lower bound is proven
(`darts_parallel.exact.schedule_bounds`). `brute_force` is the referee of all exact planners.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from math import comb, inf, isfinite

import numpy as np
import torch

from darts_parallel.cost import CostTable, HardPlans, PricedPlan, evaluate_batch
from darts_parallel.exact.result import OFFLOADING, TableResult, Verification
from darts_parallel.exact.schedule_bounds import simulated_lower_bound
from darts_parallel.plan import Plan

BATCH = 1 << 14
"""Plans that are priced at once."""
MAX_PLANS = 50_000_000
"""Plans that are still called tiny."""


def brute_force(tables: Sequence[CostTable], space_kind: str) -> TableResult:
    """Return the cheapest feasible plan of all tables and outer choices.

    Args:
        tables: One for each pipeline degree; tiny.
        space_kind: `uniform`, `stagewise` or `layerwise`.

    Errors:
        ValueError: there are more than `MAX_PLANS` plans.
    """
    best: PricedPlan | None = None
    count = 0
    for number, table in enumerate(tables):
        for plans in _all_plans(table, space_kind):
            count += len(plans)
            if count > MAX_PLANS:
                raise ValueError(f"brute force: the {space_kind} space has more than {MAX_PLANS} plans.")
            cost = evaluate_batch(table, plans)
            total = torch.where(cost.feasible, cost.iteration_time, torch.inf)
            row = int(total.argmin())
            if total[row] < (float("inf") if best is None else best.time):
                best = PricedPlan(number, plans[torch.tensor([row])], float(total[row]))
    return TableResult(best, float("inf") if best is None else best.time, True, count)


def _all_plans(table: CostTable, space_kind: str) -> Iterator[HardPlans]:
    """Return all plans of a table in batches: outer choices x splits x strategies."""
    layers = range(1, table.num_layers)
    for starts in combinations(
        [x for x in layers if not bool(table.fused_to_previous[x])], table.num_stages - 1
    ):
        split = torch.tensor([0, *starts])
        widths = torch.diff(split, append=torch.tensor([table.num_layers]))
        for outer in range(table.num_outer):
            for block in _assignments(table, outer, space_kind):
                if space_kind == "stagewise":
                    choices = block.repeat_interleave(widths, dim=1)
                else:
                    choices = block.expand(-1, table.num_layers)
                size = len(choices)
                yield HardPlans(torch.full((size,), outer), choices, split.expand(size, -1))


def _assignments(table: CostTable, outer: int, space_kind: str) -> Iterator[torch.Tensor]:
    """Return allowed strategies of the model, of every stage or of every layer: `(n, 1 | K | L)`."""
    allowed = np.flatnonzero(table.allowed[outer].numpy()).tolist()
    slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
    every = product(allowed, repeat=slots)
    while block := list(islice(every, BATCH)):
        yield torch.tensor(block)


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
