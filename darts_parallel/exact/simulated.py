"""Proofs and bounds for plans whose pipeline is simulated.

Exact planners need the closed form: a sum and a maximum over stages. The longest path through a schedule
has no such form. In a small space every plan is simulated, which proves the best one. In a larger space the
plan that is optimal by the closed form is simulated, and only a lower bound is proven.

The bound comes from the work of the devices (`outer_lower_bounds`). `packed_bound` improves it: it counts
whole layers, while the work alone may be spread evenly.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from time import monotonic

import numpy as np
import torch

from darts_parallel.cost import (
    BOUND_TOLERANCE,
    Array,
    CostTable,
    OuterCosts,
    Tables,
    kept_bytes,
    prefix_sums,
    without_offloadable_memory,
)
from darts_parallel.exact._pareto import price_grid
from darts_parallel.exact.bounds import rising_bounds, seconds_before
from darts_parallel.exact.enumeration import brute_force, number_of_plans
from darts_parallel.exact.result import TableResult, Verification, unknown_costs
from darts_parallel.plans import Plan
from darts_parallel.schedules import search_start

MAX_PRICED_PLANS = 20_000
"""Plans that are simulated one by one; about a second."""
MAX_PRICES = 8
"""Memory prices of a device; more tighten its bound by less than 0.1 %."""
ClosedForm = Callable[[], Plan | None]
"""Finds the plan that is optimal by the closed form."""
Price = Callable[[Plan], float]
"""Simulates a plan; seconds, infinite where it does not fit or is not in the space."""
SIMULATED = "every plan was simulated"
RULES_ONLY = "every plan was simulated by the rules alone, not by other orders of passes"
CLOSED_FORM = "its plan is the best by the closed form, priced by the simulation"
NO_CLOSED_FORM = "the best plan by the closed form does not fit these schedules"


def packed_bound(table: CostTable, outer: int) -> float:
    """Bound the seconds of one outer choice by counting whole layers, wherever they lie.

    Every device holds some of the j most expensive layers, and n of them cost it at least as much as its
    n cheapest. So the devices' least seconds for 1, 2, 3, ... of them are sorted: the j-th is a bound.
    Every device also waits for its first pass, and pays a price for memory.
    """
    costs = OuterCosts.read(table, outer)
    spent = costs.num_micro_batches * costs.time + costs.sync
    spent = np.where(costs.kind_allowed[:, None, :], spent, np.inf)
    rows = []
    """Seconds of layers on every device with memory priced, `(prices, L)`."""
    budgets = []
    for device in range(table.pp):
        kind = costs.stage_kind[device]
        legal = costs.kind_allowed[kind]
        in_flight = costs.in_flight[table.stage_device.numpy() == device].min()
        need = kept_bytes(costs.static, costs.activation, in_flight)[:, legal]
        seconds = spent[kind][:, legal]
        prices = price_grid(seconds, need, MAX_PRICES)
        charged = seconds + prices[:, None, None] * need
        rows.append(charged.min(-1))
        budgets.append(prices * float(table.capacity[device]))
    layers = np.concatenate(rows)
    budget = np.concatenate(budgets)[:, None]
    first_rows = np.cumsum([0, *map(len, rows[:-1])])
    waits = _first_passes(table, costs, outer)
    expensive_first = np.argsort(-spent.min((0, -1)), kind="stable")
    best = 0.0
    for number in range(1, len(expensive_first) + 1):
        expensive = layers[:, expensive_first[:number]]
        cheapest_first = np.sort(expensive, axis=-1)
        priced = cheapest_first.cumsum(-1) - budget
        seconds = np.maximum.reduceat(priced, first_rows) + waits[:, None]
        rising = np.sort(seconds, axis=None)
        best = max(best, float(rising[number - 1]))
    per_iteration = float(costs.per_iteration.min(-1).sum())
    return (best + per_iteration) * (1 - BOUND_TOLERANCE)


def _first_passes(table: CostTable, costs: OuterCosts, outer: int) -> Array:
    """Return the least seconds before the first pass of every device, `(pp,)`."""
    # a device before this one holds a layer at least
    waits = seconds_before(table.forward[outer], costs)[: table.pp]
    if not table.pipeline.blocking:
        # p2p counts the messages both ways
        both_ways = costs.p2p.min((1, 2, 3), initial=np.inf)
        one_way = both_ways[costs.boundary_kind] / 2
        waits = waits + prefix_sums(one_way)[: table.pp]
    return waits


def in_any_order(table: CostTable) -> CostTable:
    """Return the copy of a table whose bounds hold for any order of passes, where the search may change it.

    A device holds at least one micro-batch, and may leave all gradients of weights for the end.
    """
    if not table.pipeline.free:
        return table
    pipeline = table.pipeline
    if table.virtual_stages == 1:
        pipeline = replace(pipeline, schedule=search_start("loop").name)
    assert table.before is not None
    one = torch.ones_like(table.in_flight)
    return replace(table, pipeline=pipeline, in_flight=one, activation=table.before)


def simulated_lower_bound(
    tables: Tables,
    space_kind: str,
    *,
    known: float = inf,
    deadline: float = inf,
) -> float:
    """Return seconds that no feasible plan of any table undercuts by its schedule, or any order where free.

    Args:
        tables: One for each pipeline degree, number of chunks and schedule; simulated.
        space_kind: One of `config.schema.SPACES`.
        known: Seconds of a plan; the bound need not exceed it.
        deadline: `time.monotonic()` from which on looser bounds stand.
    """

    def late() -> bool:
        return monotonic() > deadline

    if any(table.own is not None and not table.own.non_negative for table in tables):
        return 0.0
    tables = [in_any_order(without_offloadable_memory(table)) for table in tables]
    lowest = known
    for bound in rising_bounds(dict(enumerate(tables)), space_kind, late):
        if bound.seconds >= lowest or late():
            return min(bound.seconds, lowest)
        improved = packed_bound(tables[bound.table], bound.outer)
        lowest = min(lowest, max(bound.seconds, improved))
    return lowest


def find_simulated_plan(
    tables: Tables,
    space_kind: str,
    closed_form: ClosedForm,
    price: Price,
    *,
    deadline: float = inf,
) -> Verification:
    """Find the optimal plan of a small space, or simulate the closed form's optimum.

    Args:
        tables: Simulated, of the whole space.
        space_kind: One of `config.schema.SPACES`.
        deadline: `time.monotonic()` from which on the bound is not improved.
    """
    unknown = unknown_costs(tables)
    if unknown:
        floor = simulated_lower_bound(tables, space_kind, deadline=deadline)
        return TableResult(None, floor, False, 0, note=unknown).verification(tables)
    if number_of_plans(tables, space_kind) <= MAX_PRICED_PLANS:
        found = replace(brute_force(tables, space_kind), note=SIMULATED)
        # this proves the best plan unless the search may change the order of passes
        if any(table.pipeline.free for table in tables):
            floor = simulated_lower_bound(tables, space_kind, known=found.cost, deadline=deadline)
            found = replace(found, proven=False, lower_bound=floor, note=RULES_ONLY)
        return found.verification(tables)
    plan = closed_form()
    seconds = inf if plan is None else price(plan)
    floor = simulated_lower_bound(tables, space_kind, known=seconds, deadline=deadline)
    reason = CLOSED_FORM
    if not isfinite(seconds):
        plan = None
        reason = NO_CLOSED_FORM
    note = f"{reason}; only the bound is proven"
    answer = TableResult(None, floor, False, 0, note=note).verification(tables)
    return replace(answer, plan=plan, iteration_time_s=seconds)
