"""Search the best use of a budget by slopes of all plans, with a bound that proves it.

At a point: seconds of all plans of all jobs (one call), and their slopes where the search goes on.
They bound every plan everywhere (`bound`); the next point is where the bound of the most promising
plan is lowest, with exactly the memory that the plan needs. Discrete choices take turns by their
bounds, and end once those are above the best that was found. Tangents know nothing of budgets: one
search serves the whole Pareto front and the least money for a target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log1p
from typing import NamedTuple

import numpy as np

from darts_parallel.config import require
from darts_parallel.cost import Array, Index
from darts_parallel.design.bound import ROUNDS, Bound, Lines, log_tangents
from darts_parallel.design.figures import MEMORY, figure_of, sense
from darts_parallel.design.pricing import Priced, Pricing
from darts_parallel.design.request import Design, Option
from darts_parallel.errors import InfeasibleError
from darts_parallel.plans import Plan

MOST_POINTS = 60
"""Points at which the plans of one discrete choice are priced for one budget."""
MOST_COMBINED = 500_000
"""Combinations of plans of several jobs: about a gigabyte of tangents."""
SLACK = 1e-9
"""Share by which more memory is bought than a plan needs, against rounding."""
PAID = 1.0 + 1e-12
"""Factor of a budget up to which it is kept, above rounding."""
ByKnob = dict[str, float]
"""A figure of every knob by its name."""


class Branch:
    """One discrete choice: C combinations of one plan for every job, priced at K points of log goodness.

    Attributes:
        plans: Number of the plan by job, `(C, J)`.
        needs, memory: Factors of memory knobs that combinations need, `(C, M)`, and their cost,
            `(C,)`.
        points, priced: Where plans were priced, `(n,)` each, and what came out by job.
    """

    def __init__(self, option: Option, weights: tuple[float, ...]) -> None:
        knobs = option.knobs
        self.option = option
        self.weights = weights
        figures = [figure_of(name) for name in knobs.names]
        self.is_memory = np.array([figure == MEMORY for figure in figures])
        self.knobs = knobs.only(~self.is_memory)
        memories = knobs.only(self.is_memory)
        self.pricings = [Pricing(problem, self.knobs, memories) for problem in option.problems]
        sizes = [len(pricing.needs) for pricing in self.pricings]
        self.plans = _combinations(sizes)
        pairs = zip(self.pricings, self.plans.T, strict=True)
        needs = [pricing.needs[plans] for pricing, plans in pairs]
        self.needs = np.max(needs, axis=0) * (1 + SLACK)
        costs = memories.cost(np.log(self.needs))
        self.memory = costs.sum(1)
        self.least = self.total(knobs.low)
        self.most = self.total(knobs.high)
        self.damping = self.knobs.exponent / (1.0 + self.knobs.exponent)
        """Factor of moves at which shares of the money settle at once."""
        self.points: list[Array] = []
        self.priced: list[list[Priced]] = []

    def total(self, z: Array) -> float:
        """Return the money of all knobs, memory included, and the fixed part."""
        costs = self.option.knobs.cost(z)
        return float(self.option.fixed + costs.sum())

    def heights(self, point: int) -> Array:
        """Return the log seconds of all combinations at a point by job, `(C, J)`."""
        pairs = zip(self.priced[point], self.plans.T, strict=True)
        return np.stack([priced.heights[plans] for priced, plans in pairs], axis=1)

    def lines(
        self,
        point: int,
        rows: Index,
        at: Array,
    ) -> Lines:
        """Return the tangents at `at` of what slopes at a point say of c combinations."""
        heights = np.zeros(len(rows))
        slopes = np.zeros((len(rows), len(self.knobs)))
        for job, weight in enumerate(self.weights):
            priced = self.priced[point][job]
            plans = self.plans[rows, job]
            factors = self.pricings[job].factors
            begin = priced.point.detach().numpy()
            end = at @ factors.T
            steep = priced.slopes[plans]
            own = log_tangents(priced.heights[plans], steep, begin, end)
            heights += weight * own.heights
            slopes += weight * own.slopes @ factors
        return Lines(heights, slopes)

    def incumbent(self, budget: float, best: "Use") -> "Use":
        """Return the best that a budget pays at the points so far, where it is better than `best`."""
        for point, z in enumerate(self.points):
            spent = self.option.fixed + self.knobs.cost(z).sum()
            left = budget - spent
            means = self.heights(point) @ self.weights
            seconds = np.where(self.memory <= left * PAID, means, inf)
            row = int(seconds.argmin())
            if seconds[row] < best.value:
                best = Use(float(seconds[row]), self, point, row)
        return best

    def lowest(self, budget: float, limit: float) -> Bound:
        """Return the lowest bound that any combination of plans has, and where it is.

        The slopes at every point bound all combinations. Their tangents move to where the last ones
        are lowest, `ROUNDS` times.

        Args:
            limit: Combinations whose bound reaches this are not looked at further.
        """
        money = budget - self.option.fixed - self.memory
        least = self.knobs.cost(self.knobs.low).sum()
        bounds = np.where(money < least, inf, -inf)
        z = np.zeros((len(money), len(self.knobs)))
        for point, begin in enumerate(self.points):
            at = np.tile(begin, (len(money), 1))
            for turn in range(ROUNDS):
                rows = np.flatnonzero(bounds < limit)
                lines = self.lines(point, rows, at[rows])
                spent = self.knobs.spend(lines.slopes, money[rows])
                value = lines.heights + spent.value
                raised = value > bounds[rows]
                bounds[rows[raised]] = value[raised]
                z[rows[raised]] = spent.z[raised]
                damping = self.damping if turn else 1.0
                at[rows] += damping * (spent.z - at[rows])
        row = int(bounds.argmin())
        return Bound(float(bounds[row]), z[row])


def _combinations(sizes: list[int]) -> Index:
    """Return the numbers of plans, by job, of all combinations of one plan for every job."""
    count = int(np.prod(sizes))
    rule = f"have at most {MOST_COMBINED} combinations of plans, not {count}"
    near = "fewer jobs, or pins like space.zero_stage=1"
    require(count <= MOST_COMBINED, "design.jobs", rule, near)
    numbers = np.indices(sizes)
    return numbers.reshape(len(sizes), -1).T


class Use(NamedTuple):
    """A use of a budget: log seconds, the branch, and the numbers of its point and combination of plans."""

    value: float
    branch: Branch
    point: int = 0
    row: int = 0


@dataclass(frozen=True)
class Answer:
    """The best use of one budget that was found, and its proof; by knob, in SI units and the design's money.

    Several jobs have their weighted geometric mean of seconds. The bound is over all uses of the
    budget and all even uniform plans.
    """

    option: Option
    budget: float
    log_seconds: float
    log_bound: float
    job_iteration_times_s: list[float]
    plans: list[Plan]
    planner_calls: int
    """Points at which all tables were built for this answer."""
    knobs: ByKnob
    """Figures in SI units."""
    factors: ByKnob
    """Figures over their references."""
    costs: ByKnob
    """Money for every knob."""
    elasticities: ByKnob
    """D log(seconds) / d log(figure); 0 for memory."""
    seconds_saved_per_unit: ByKnob
    """Seconds that one more unit of money saves; 0 for the knobs at their bound."""
    at_bound: list[str]
    """Knobs that cannot be better."""

    @property
    def iteration_time_s(self) -> float:
        """Seconds per iteration."""
        return exp(self.log_seconds)

    @property
    def bound_iteration_time_s(self) -> float:
        """Seconds below which no use of the budget is."""
        return exp(self.log_bound)

    @property
    def gap(self) -> float:
        """Share by which the seconds may be above the optimum."""
        return exp(self.log_seconds - self.log_bound) - 1.0

    @property
    def spent(self) -> float:
        """Money for all knobs and the fixed part."""
        return self.option.fixed + sum(self.costs.values())


class Designer:
    """A search that keeps its tangents from budget to budget.

    Attributes:
        history: Money by knob and best seconds so far, by call.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.history: list[tuple[ByKnob, float]] = []
        self.branches: list[Branch] = []
        for option in design.options:
            try:
                self.branches.append(Branch(option, design.weights))
            except InfeasibleError:
                if not self.branches and option is design.options[-1]:
                    raise
        self.least = min(branch.least for branch in self.branches)

    def solve(self, budget: float) -> Answer:
        """Find the best use of a budget.

        Errors:
            ConfigError: the budget is below the fixed part and the least of every knob.
            InfeasibleError: no plan's memory can be paid.
        """
        rule = f"be above the fixed part and the least of every knob, {self.least:g}"
        require(self.least <= budget, f"design.budget={budget:g}", rule, f"{self.least * 1.2:.3g}")
        before = len(self.history)
        branches = list(self._payable(budget))
        best = Use(inf, self.branches[0])
        for branch in branches:
            best = branch.incumbent(budget, best)
            if not branch.points:
                start = branch.pricings[0].start
                best = self.price(branch, start, budget, best)
        best, bound = self._closed(branches, budget, best)
        if best.value == inf:
            raise InfeasibleError(
                f"design.budget={budget:g} must pay the memory of one plan next to the "
                "least of every knob; try a larger budget, or lower bounds."
            )
        calls = len(self.history) - before
        return _answer(best, min(best.value, bound), budget, calls)

    def _payable(self, budget: float) -> Iterator[Branch]:
        """Yield the discrete choices of which a budget pays the least of every knob."""
        return (branch for branch in self.branches if branch.least <= budget)

    def _closed(
        self,
        branches: Sequence[Branch],
        budget: float,
        best: Use,
    ) -> tuple[Use, float]:
        """Price the most promising discrete choice until none can be better; return the lowest bound, too."""
        open_ = list(branches)
        bounds = dict.fromkeys(branches, -inf)
        most = {branch: len(branch.points) + MOST_POINTS for branch in branches}
        while open_:
            branch = min(open_, key=bounds.__getitem__)
            limit = best.value - log1p(self.design.tolerance / 2)
            point = branch.points[0]
            if bounds[branch] < limit:
                bounds[branch], point = branch.lowest(budget, limit)
            if bounds[branch] >= limit or len(branch.points) >= most[branch]:
                open_.remove(branch)
            else:
                best = self.price(branch, point, budget, best)
        return best, min(bounds.values())

    def reach(self, seconds: float) -> Answer:
        """Find the least budget, within the tolerance, for which an iteration takes `seconds`.

        Errors:
            ConfigError: the highest of every knob does not suffice.
        """
        low = self.least
        high = max(branch.most for branch in self.branches)
        best = self.solve(high).iteration_time_s
        rule = f"be above what the highest of every knob reaches, {best:.4g} s"
        require(best <= seconds, f"design.target={seconds:g}", rule, f"{best * 1.05:.4g}")
        while True:
            budget = self._least_allowed(low, high, log(seconds))
            answer = self.solve(budget)
            if answer.iteration_time_s <= seconds:
                return replace(answer, planner_calls=len(self.history))
            low = budget

    def _least_allowed(
        self,
        low: float,
        high: float,
        log_seconds: float,
    ) -> float:
        """Return the least budget between two whose bounds, by the tangents so far, allow some seconds."""
        goal = log_seconds - log1p(self.design.tolerance / 2)
        step = log1p(self.design.tolerance / 10)
        while log(high / low) > step:
            middle = (low * high) ** 0.5
            bounds = (own.lowest(middle, inf).value for own in self._payable(middle))
            if any(bound <= goal for bound in bounds):
                high = middle
            else:
                low = middle
        return high

    def price(
        self,
        branch: Branch,
        z: Array,
        budget: float,
        best: Use,
    ) -> Use:
        """Price all plans of a branch at a point, and return the best that the budget pays by then."""
        if branch.points:
            priced = [job.at(z) for job in branch.pricings]
        else:
            priced = [job.at_start for job in branch.pricings]
        branch.priced.append(priced)
        branch.points.append(z)
        best = branch.incumbent(budget, best)
        costs = branch.knobs.cost(z).tolist()
        by_name = dict(zip(branch.knobs.names, costs, strict=True))
        self.history.append((by_name, exp(best.value)))
        return best


def _answer(
    use: Use,
    bound: float,
    budget: float,
    calls: int,
) -> Answer:
    """Return the answer in the units of the figures."""
    branch = use.branch
    knobs = branch.option.knobs
    z = np.zeros(len(knobs))
    at = branch.points[use.point]
    z[~branch.is_memory] = at
    z[branch.is_memory] = np.log(branch.needs[use.row])
    slopes = np.zeros(len(knobs))
    lines = branch.lines(use.point, np.array([use.row]), at[None])
    slopes[~branch.is_memory] = lines.slopes[0]
    senses = np.array([sense(name) for name in knobs.names], dtype=np.float64)
    factors = np.exp(senses * z)
    costs = knobs.cost(z)
    at_bound = z >= knobs.high - SLACK
    saved = np.where(at_bound, 0.0, -slopes / (knobs.exponent * costs)) * exp(use.value)
    columns = {
        "factors": factors,
        "knobs": factors * knobs.reference,
        "costs": costs,
        "elasticities": senses * slopes,
        "seconds_saved_per_unit": saved,
    }
    named = {}
    for key, column in columns.items():
        named[key] = dict(zip(knobs.names, column.tolist(), strict=True))
    pairs = zip(branch.pricings, branch.plans[use.row], strict=True)
    plans = [pricing.plan(number) for pricing, number in pairs]
    seconds = np.exp(branch.heights(use.point)[use.row]).tolist()
    best = list(knobs.only(at_bound).names)
    return Answer(
        branch.option, budget, use.value, bound, seconds, plans, calls, at_bound=best, **named
    )
