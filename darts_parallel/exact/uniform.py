"""The uniform space by enumeration: one strategy for all layers, any split into stages.

Every configuration (stages, micro-batches, strategy) is bounded by its mean stages; in the order of bounds,
those of one outer choice are bounded again, their sum, bottleneck and synchronisation each by the best split,
and what is still below the best plans so far is solved exactly.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
import torch

from darts_parallel.cost import (
    Array,
    CostTable,
    Index,
    OuterCosts,
    PricedPlan,
    evaluate_batch,
    even_uniform_plans,
)
from darts_parallel.exact.bounds import outer_lower_bounds, spread_bounds
from darts_parallel.exact.chosen_stages import ChosenStages
from darts_parallel.exact.outer_choice import AGREEMENT, OuterChoiceSolver
from darts_parallel.exact.result import (
    OFFLOADING,
    Check,
    DeadlineError,
    TableResult,
    deadline_check,
)
from darts_parallel.exact.segments import StageSegments

FIRST_MARGIN = 0.002
"""A configuration is first searched for splits this close to its bound, relative."""
EVEN_ONLY = "optimal but for interleaved plans of uneven stages, which are bounded only"
ELEMENTS = 2_000_000
"""Stages of configurations that are bounded at once."""
TOLERANCE = 1e-12
"""Relative; rounding of prefix sums must not exclude a plan."""


def find_uniform_plan(
    tables: Sequence[CostTable],
    incumbent: float = inf,
    deadline: float | None = None,
    *,
    count: int = 1,
    even: bool = False,
) -> TableResult:
    """Return the optimal uniform plan over all tables, and the best of the next configurations.

    Args:
        deadline: `time.monotonic()` at which to stop without a proof.
        count: Configurations (stages, micro-batches, strategy) to rank; each with its best split.
        even: Interleaved plans have equal chunks; else those of unequal ones are bounded only.

    Returns:
        The best plan; `alternatives` holds the `count` best configurations, the best plan first.
    """
    if any(table.host for table in tables):
        lowest = min(float(outer_lower_bounds(table, "uniform").min()) for table in tables)
        return TableResult(None, lowest, False, 0, note=OFFLOADING)
    check, closed = deadline_check(deadline), _quick_bounds(tables)
    known = min(_even_seconds(tables, count), incumbent) * (1 + AGREEMENT)
    found, interleaved_floor, proven = _even_interleaved(tables, incumbent, count, deadline)
    even = even and proven
    effort, reached, proven = sum(len(bounds) for _, bounds in closed.values()), 0.0, True
    interleaved = any(table.virtual_stages > 1 for table in tables) and not even
    # a number below 0 in the place of the strategy: all of an outer choice, with the least quick bound
    queue = [(bounds.min(), *key, -1) for key, (_, bounds) in closed.items()]
    heapify(queue)
    try:
        while queue:
            reached, number, outer, choice = heappop(queue)
            limit = found[count - 1].time if len(found) >= count else incumbent * (1 + AGREEMENT)
            if reached > limit or reached == np.inf:
                break
            if choice < 0:
                choices, bounds = closed[number, outer]
                own = choices[bounds <= min(limit, known)]
                tighter = uniform_bounds(tables[number], outer, own, check)
                for bound, each in zip(tighter.tolist(), own.tolist(), strict=True):
                    heappush(queue, (bound, number, outer, each))
                continue
            case = OuterChoiceSolver(tables[number], number, outer, reached, np.array([choice]))
            plan = _best_split(case, limit, check)
            effort += case.labels
            if plan is not None:
                found = sorted([*found, plan], key=lambda candidate: candidate.time)[:count]
    except DeadlineError:
        proven = False
    best = found[0] if found else None
    cost = best.time if best else (np.inf if incumbent == np.inf else incumbent * (1 + AGREEMENT))
    floor = min(cost if proven else min(cost, reached), inf if even else interleaved_floor)
    note = EVEN_ONLY if proven and interleaved else ""
    return TableResult(best, float(floor), proven and not interleaved, effort, tuple(found), note)


def _even_interleaved(
    tables: Sequence[CostTable], incumbent: float, count: int, deadline: float | None
) -> tuple[list[PricedPlan], float, bool]:
    """Return the `count` best interleaved plans of even stages, a bound on all, and whether time sufficed.

    Even are all layers, or all but the first and the last. What the mean work of a device excludes is not
    simulated, the outer choices of the least bounds first.
    """
    found, queue = list[PricedPlan](), list[tuple[float, int, int]]()
    for number, table in enumerate(tables):
        if table.virtual_stages > 1:
            queue += [
                (float(b), number, outer) for outer, b in enumerate(outer_lower_bounds(table))
            ]
    check = deadline_check(deadline)
    floor = min((bound for bound, *_ in queue), default=inf)
    try:
        for bound, number, outer in sorted(queue):
            limit = found[count - 1].time if len(found) >= count else incumbent * (1 + AGREEMENT)
            if bound > limit or bound == inf:
                break
            check()
            one = tables[number].select([outer])
            for ends_apart in (True, False):
                plans = even_uniform_plans(one, ends_apart=ends_apart)
                work = (
                    one.time[0].amin(0).sum(0)[plans.choices[:, 0]] * one.num_micro_batches / one.pp
                )
                plans = plans[work.detach() <= limit]
                cost = evaluate_batch(one, plans)
                times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
                for index in times.argsort(stable=True)[:count].tolist():
                    if times[index] <= limit and cost.feasible[index]:
                        plan = replace(plans[index : index + 1], outer=torch.tensor([outer]))
                        found.append(PricedPlan(number, plan, float(times[index])))
            found = sorted(found, key=lambda candidate: candidate.time)[:count]
    except DeadlineError:
        return found, floor, False
    return found, floor, True


def _best_split(case: OuterChoiceSolver, limit: float, check: Check) -> PricedPlan | None:
    """Return the best split of one configuration within `limit`, by a rising limit of its own."""
    lowest, margin, limit = case.bound, FIRST_MARGIN, min(limit, case.most_expensive())
    while case.bound <= limit:
        check()
        plan = case.attempt("stagewise", min(lowest * (1 + margin), limit), check)
        if plan is not None:
            return plan
        margin *= 4
    return None


def _even_seconds(tables: Sequence[CostTable], count: int) -> float:
    """Return the seconds of the `count`-th best plan of even stages; infinite where there are not as many."""
    seconds = [torch.full((count,), torch.inf, dtype=torch.float64)]
    for table in tables:
        if table.virtual_stages == 1:
            cost = evaluate_batch(table, even_uniform_plans(table))
            seconds.append(cost.iteration_time[cost.feasible].detach())
    return float(torch.cat(seconds).sort().values[count - 1])


def _quick_bounds(tables: Sequence[CostTable]) -> dict[tuple[int, int], tuple[Index, Array]]:
    """Return legal strategies of every table and outer choice, and their bounds by stages of equal seconds.

    They know neither memory nor boundaries.
    """
    result = {}
    for number, table in enumerate(tables):
        if table.virtual_stages > 1:
            continue
        outer, choice = torch.nonzero(table.allowed & table.runnable.all(0), as_tuple=True)
        figures = (table.time.amin(1), table.sync.amin(1), table.per_iteration)
        seconds, sync, per_iteration = (values.detach()[outer, :, choice] for values in figures)
        bounds = spread_bounds(
            seconds, sync, per_iteration, table.num_micro_batches[outer], table.pp
        )
        for own in torch.unique(outer).tolist():
            result[number, own] = choice[outer == own].numpy(), bounds[outer == own].numpy()
    return result


def uniform_bounds(table: CostTable, outer: int, choices: Index, check: Check) -> Array:
    """Lower bounds on the iteration time of uniform configurations over all splits.

    Args:
        choices: Strategy of every configuration, `(B,)`.
        check: Called often; raises `DeadlineError` when the time is over.

    Returns:
        Seconds, `(B,)`; infinite where no split fits the memory.
    """
    costs = OuterCosts.whole(table, outer)
    size = max(ELEMENTS // len(StageSegments.legal(costs.pp, costs.fused_to_previous)), 1)
    result = np.empty(len(choices))
    for begin in range(0, len(choices), size):
        check()
        result[begin : begin + size] = _split_bounds(costs, choices[begin : begin + size])
    return result * (1 - TOLERANCE)


def _split_bounds(costs: OuterCosts, choices: Index) -> Array:
    """Bound sum, bottleneck and synchronisation of splits apart, or the two maxima of one stage together."""
    stages = ChosenStages(costs, np.repeat(choices[:, None], costs.num_layers, axis=1))
    rest, segments, sync = costs.num_micro_batches - 1.0, stages.segments, stages.sync()
    seconds = np.where(stages.fits(), stages.seconds(), np.inf)
    unfit = np.isinf(seconds)
    both = rest * np.where(unfit, 0.0, seconds) + sync
    fitting = (np.where(unfit, np.inf, values) for values in (sync, both))
    largest_sync, joint = (segments.before(values, np.maximum)[-1, -1] for values in fitting)
    least, slowest = (segments.before(seconds, join)[-1, -1] for join in (np.add, np.maximum))
    # infinite least sums say that nothing fits
    apart = rest * np.where(np.isinf(slowest), 0.0, slowest) + largest_sync
    return np.asarray(least + np.maximum(apart, joint) + costs.per_iteration[:, choices].sum(0))
