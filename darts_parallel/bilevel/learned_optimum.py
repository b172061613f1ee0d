"""The plan of least learned time to target, proven by exact planners of seconds.

`log T + S` with T seconds and S log slowdown is quasi-concave, so its least value over all plans lies at a
corner of the convex hull of their points (S, T), and every such corner is the plan of least `T + m S` for
some price m of a log step in seconds. For a given m that is an ordinary problem of the exact planner, with
`m S` among the seconds that are paid once. Prices between two solved ones are excluded by the corner of their
supporting lines (the bisection of Eisner and Severance 1976, Journal of the ACM 23(4), with bounds).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from darts_parallel.bilevel._log_slowdown import LogSlowdown
from darts_parallel.bilevel._relaxed_plans import JointPlan, price_plans
from darts_parallel.bilevel.joint_space import FIRST_BLOCK, JointSpace
from darts_parallel.cost import CostTable
from darts_parallel.exact import DeadlineError, find_layerwise_plan

AGREEMENT = 1e-7
"""Differences of the objective below this are rounding."""
RATIO = 1e3
"""Price of a log step, in seconds of the fastest plan, at which no seconds are worth a step."""


@dataclass(frozen=True)
class LearnedOptimum:
    """The best plan over all global batch sizes, and what is proven of it."""

    plan: JointPlan | None
    lower_bound: float
    """No plan of the space has a smaller objective."""
    proven: bool
    plans_evaluated: int


@dataclass(frozen=True)
class _Corner:
    """The plan of least `T + m S` at one price m, and that least value."""

    price: float
    level: float
    plan: JointPlan
    """Its log slowdown leaves out what all plans of a batch size share."""


@dataclass
class _BatchTables:
    """All tables of one global batch size, solved price by price."""

    space: JointSpace
    numbers: Sequence[int]
    prices: LogSlowdown
    deadline: float
    plans: int = 0

    def corner(self, price: float, incumbent: float = float("inf")) -> _Corner | None:
        """Return the plan of least `T + price * S`; None where no plan fits.

        Errors:
            DeadlineError: the time was over before the proof.
        """
        tables = [self._priced(self.space.tables[number], price) for number in self.numbers]
        answer = find_layerwise_plan(tables, "layerwise", incumbent, self.deadline)
        self.plans += answer.plans_evaluated
        if not answer.proven:
            raise DeadlineError
        if answer.best is None:
            return None
        found = price_plans(self.space, self.numbers[answer.best.table], answer.best.plan, self.prices)
        assert found is not None
        return _Corner(price, found.seconds + price * found.log_slowdown, found)

    def _priced(self, table: CostTable, price: float) -> CostTable:
        steps = self.prices.on_choices(table.choices, table.num_layers, FIRST_BLOCK)
        return replace(table, per_iteration=table.per_iteration + price * steps)


def find_learned_optimum(space: JointSpace, prices: LogSlowdown, budget: float) -> LearnedOptimum:
    """Find the best plan of the space by the learned objective.

    Args:
        space: Priced plans.
        prices: Prices in steps.
        budget: Wall-clock seconds; after them the best plan found stands without a proof.
    """
    deadline = time.monotonic() + budget
    best: JointPlan | None = None
    bound, proven, plans = float("inf"), True, 0
    shifted, common = prices.nonnegative()
    shifted = replace(shifted, by_batch=dict.fromkeys(prices.by_batch, 0.0))
    for batch in space.batches:
        offset = prices.by_batch[batch] + common
        problem = _BatchTables(space, space.of_batch(batch), shifted, deadline)
        found, low = _search(problem)
        proven &= low is not None
        bound = min(bound, float("-inf") if low is None else low + offset)
        if found is not None:
            found = replace(found, log_slowdown=found.log_slowdown + offset)
            if best is None or found.value < best.value:
                best = found
        plans += problem.plans
    return LearnedOptimum(best, bound, proven, plans)


def _search(problem: _BatchTables) -> tuple[JointPlan | None, float | None]:
    """Return the best plan of one batch size and a proven bound of its objective, None without a proof."""
    best: JointPlan | None = None
    try:
        first = problem.corner(0.0)
        if first is None:
            return None, float("inf")
        best = first.plan
        last = problem.corner(RATIO * first.plan.seconds)
        assert last is not None
        best = min(best, last.plan, key=lambda plan: plan.value)
        intervals = [(first, last)]
        while intervals:
            low, high = intervals.pop()
            if _excluded(low, high, best):
                continue
            # the objective's own slope at the best plan is its seconds: near its corner few prices are left
            price = _next_price(low, high, best)
            known = [end.level + (price - end.price) * end.plan.log_slowdown for end in (low, high)]
            middle = problem.corner(price, min(known))
            if middle is None:
                continue
            best = min(best, middle.plan, key=lambda plan: plan.value)
            intervals += [(low, middle), (middle, high)]
    except DeadlineError:
        return best, None
    return best, best.value - AGREEMENT


def _excluded(low: _Corner, high: _Corner, best: JointPlan) -> bool:
    """Tell whether no plan between two prices can be better than the best one.

    Such plans lie above both supporting lines `T + m S = level`, so in the triangle of the two corners and
    the lines' crossing, where a quasi-concave objective is least at a vertex.
    """
    if high.price <= low.price * (1.0 + 1e-12) or abs(low.plan.log_slowdown - high.plan.log_slowdown) < 1e-12:
        return True
    steps = (high.level - low.level) / (high.price - low.price)
    seconds = low.level - low.price * steps
    return seconds > 0.0 and log(seconds) + steps >= best.value - AGREEMENT


def _next_price(low: _Corner, high: _Corner, best: JointPlan) -> float:
    """Return the slope of the objective at the best plan where it lies inside, else that of the chord."""
    inside = low.price * (1.0 + 1e-9) < best.seconds < high.price * (1.0 - 1e-9)
    if inside:
        return best.seconds
    rise = low.plan.log_slowdown - high.plan.log_slowdown
    chord = (high.plan.seconds - low.plan.seconds) / rise
    return min(max(chord, low.price * (1.0 + 1e-9)), high.price)
