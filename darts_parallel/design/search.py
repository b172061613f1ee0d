"""Search the best use of a budget by slopes of all plans, with a bound that proves it.

At a point: seconds of all plans of all jobs (one call), and their slopes where the search goes on. They
bound every plan everywhere (`bound`); the next point is where the bound of the most promising plan is lowest,
with exactly the memory that the plan needs. Discrete choices take turns by their bounds, and end once those
are above the best that was found.
Tangents know nothing of budgets: one search serves the whole Pareto front and the least money for a target.
"""

from dataclasses import dataclass, replace
from math import exp, inf, log, log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_parallel.config import require
from darts_parallel.design.bound import ROUNDS, Array, dual_bound, log_tangents
from darts_parallel.design.figures import FIGURES, MEMORY, figure_of
from darts_parallel.design.pricing import Priced, Pricing
from darts_parallel.design.request import Design, Option
from darts_parallel.errors import InfeasibleError
from darts_parallel.plans import Plan

MOST_POINTS = 60  # at which the plans of one discrete choice are priced for one budget
MOST_COMBINED = 500_000  # combinations of plans of several jobs
SLACK = 1e-9  # share by which more memory is bought than a plan needs, against rounding
Rows = NDArray[np.int64]


class Branch:
    """One discrete choice: C combinations of one plan for every job, priced at K points of log goodness.

    Attributes:
        plans: Number of the plan by job, `(C, J)`.
        needs, memory: Factors of memory knobs that combinations need, `(C, M)`, and their cost, `(C,)`.
        points, priced: Where plans were priced, `(n,)` each, and what came out by job.
    """

    def __init__(self, option: Option, weights: tuple[float, ...]) -> None:
        self.option, self.weights = option, weights
        self.is_memory = np.array([figure_of(name) == MEMORY for name in option.knobs.names])
        self.knobs, memories = option.knobs.only(~self.is_memory), option.knobs.only(self.is_memory)
        self.pricings = [Pricing(problem, self.knobs, memories) for problem in option.problems]
        sizes = [len(pricing.needs) for pricing in self.pricings]
        rule = f"have at most {MOST_COMBINED} combinations of plans, not {np.prod(sizes)}"
        few = int(np.prod(sizes)) <= MOST_COMBINED
        require(few, "design.jobs", rule, "fewer jobs, or pins like space.zero_stage=1")
        self.plans: Rows = np.indices(sizes).reshape(len(sizes), -1).T
        own = [p.needs[plans] for p, plans in zip(self.pricings, self.plans.T, strict=True)]
        self.needs = np.max(own, axis=0) * (1 + SLACK)
        self.memory = memories.cost(np.log(self.needs)).sum(1)
        ends = (option.knobs.cost(z).sum() for z in (option.knobs.low, option.knobs.high))
        self.least, self.most = (float(option.fixed + end) for end in ends)
        self.damping = self.knobs.exponent / (1.0 + self.knobs.exponent)  # settles shares at once
        self.points: list[Array] = []
        self.priced: list[list[Priced]] = []

    def heights(self, point: int) -> Array:
        """Return the log seconds of all combinations at a point by job, `(C, J)`."""
        jobs = zip(self.priced[point], self.plans.T, strict=True)
        return np.stack([priced.heights[plans] for priced, plans in jobs], axis=1)

    def lines(self, point: int, rows: Rows, at: Array) -> tuple[Array, Array]:
        """Return b `(c,)` and A `(c, n)`: tangents at `at` of what slopes at a point say of combinations."""
        b, a = np.zeros(len(rows)), np.zeros((len(rows), len(self.knobs.names)))
        jobs = zip(self.weights, self.priced[point], self.plans[rows].T, self.pricings, strict=True)
        for weight, priced, plans, pricing in jobs:
            at_factors = priced.point.detach().numpy(), at @ pricing.factors.T
            own, steeper = log_tangents(priced.heights[plans], priced.slopes[plans], *at_factors)
            b, a = b + weight * own, a + weight * steeper @ pricing.factors
        return b, a

    def incumbent(self, budget: float, best: "Use") -> "Use":
        """Return the best that a budget pays at the points so far, where it is better than `best`."""
        for point, z in enumerate(self.points):
            paid = self.memory <= (budget - self.option.fixed - self.knobs.cost(z).sum()) * (
                1 + 1e-12
            )
            every = np.where(paid, self.heights(point) @ self.weights, inf)
            row = int(every.argmin())
            best = min(best, Use(float(every[row]), self, point, row), key=lambda use: use.value)
        return best

    def lowest(self, budget: float, limit: float) -> tuple[float, Array]:
        """Return the lowest bound that any combination of plans has, and where it is.

        Points bound a plan one by one while it is below a limit, together only where it may be the lowest.
        """
        rest = budget - self.option.fixed - self.memory
        bounds = np.where(rest < self.knobs.cost(self.knobs.low).sum(), inf, -inf)
        for point, z in enumerate(self.points):
            at = np.tile(z, (len(rest), 1))
            for turn in range(ROUNDS):
                rows = np.flatnonzero(bounds < limit)
                b, a = self.lines(point, rows, at[rows])
                values, better = self.knobs.spend(a, rest[rows])
                bounds[rows] = np.maximum(bounds[rows], b + values)
                at[rows] += (self.damping if turn else 1.0) * (better - at[rows])
        points = dict[int, Array]()
        while np.isfinite(bounds.min()):
            row = int(bounds.argmin())
            if row in points:
                return float(bounds[row]), points[row]
            value, points[row] = self._together(row, float(rest[row]))
            bounds[row] = max(value, bounds[row])
        return inf, self.points[0]

    def _together(self, row: int, money: float) -> tuple[float, Array]:
        """Return the bound of one combination by all points, and where it is reached."""

        def bound(at: list[Array]) -> tuple[float, Array]:
            lines = (self.lines(k, np.array([row]), z) for k, z in enumerate(at))
            b, a = map(np.concatenate, zip(*lines, strict=True))
            return dual_bound(self.knobs, b, a, money)

        best, at = bound(self.points)
        for _ in range(ROUNDS - 1):
            value, z = bound([at] * len(self.points))
            best, move = max(value, best), self.damping * (z - at)
            at = at + move
            if np.abs(move).max(initial=0.0) < 0.002:
                break
        return best, at


class Use(NamedTuple):
    """A use of a budget: log seconds, the branch, and the numbers of its point and combination of plans."""

    value: float
    branch: Branch
    point: int = 0
    row: int = 0


@dataclass(frozen=True)
class Answer:
    """The best use of one budget that was found, and its proof; by knob, in SI units and the design's money.

    Factors are over the references, elasticities d log(seconds) / d log(figure), savings those by one more
    unit of money: 0 for the knobs at their bound. Several jobs have their weighted geometric mean of seconds.
    The bound is over all uses of the budget and all even uniform plans; the seconds may be above the optimum
    by the share `gap`. Planner calls are points at which all tables were built for this answer.
    """

    option: Option
    knobs: dict[str, float]
    factors: dict[str, float]
    costs: dict[str, float]
    elasticities: dict[str, float]
    seconds_saved_per_unit: dict[str, float]
    at_bound: list[str]
    spent: float
    budget: float
    iteration_time_s: float
    bound_iteration_time_s: float
    job_iteration_times_s: list[float]
    plans: list[Plan]
    planner_calls: int
    gap: float


class Designer:
    """A search that keeps its tangents from budget to budget.

    Attributes:
        history: Money by knob and best seconds so far, by call.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.history: list[tuple[dict[str, float], float]] = []
        self.branches = list[Branch]()
        for option in design.options:
            try:
                self.branches.append(Branch(option, design.weights))
            except InfeasibleError:
                if not self.branches and option is design.options[-1]:
                    raise
        self.least = min(branch.least for branch in self.branches)

    def solve(self, budget: float, *, elasticities: bool = True) -> Answer:
        """Find the best use of a budget; elasticities at the answer are not needed for its proof.

        Errors:
            ConfigError: the budget is below the fixed part and the least of every knob.
            InfeasibleError: no plan's memory can be paid.
        """
        rule = f"be above the fixed part and the least of every knob, {self.least:g}"
        require(self.least <= budget, f"design.budget={budget:g}", rule, f"{self.least * 1.2:.3g}")
        before = len(self.history)
        open_, best = [b for b in self.branches if b.least <= budget], Use(inf, self.branches[0])
        for branch in open_:
            best = branch.incumbent(budget, best)
            if not branch.points:
                best = self.price(branch, branch.pricings[0].start, budget, best)
        bounds, first = dict.fromkeys(open_, -inf), {b: len(b.points) for b in open_}
        while open_:
            branch = min(open_, key=bounds.__getitem__)
            limit, point = best.value - log1p(self.design.tolerance / 2), branch.points[0]
            if bounds[branch] < limit:
                bounds[branch], point = branch.lowest(budget, limit)
            if bounds[branch] >= limit or len(branch.points) - first[branch] >= MOST_POINTS:
                open_.remove(branch)
            else:
                best = self.price(branch, point, budget, best)
        if best.value == inf:
            raise InfeasibleError(
                f"design.budget={budget:g} must pay the memory of one plan next to the "
                "least of every knob; try a larger budget, or lower bounds."
            )
        calls = len(self.history) - before
        return self._answer(best, min(best.value, *bounds.values()), budget, calls, elasticities)

    def reach(self, seconds: float) -> Answer:
        """Find the least budget, within the tolerance, for which an iteration takes `seconds`.

        Errors:
            ConfigError: the highest of every knob does not suffice.
        """
        low, high = self.least, max(branch.most for branch in self.branches)
        best = self.solve(high).iteration_time_s
        rule = f"be above what the highest of every knob reaches, {best:.4g} s"
        require(best <= seconds, f"design.target={seconds:g}", rule, f"{best * 1.05:.4g}")
        goal, step = (
            log(seconds) - log1p(self.design.tolerance / 2),
            log1p(self.design.tolerance / 10),
        )
        while True:
            top = high
            while log(top / low) > step:  # what the tangents so far allow at least
                middle = (low * top) ** 0.5
                below = any(
                    b.lowest(middle, inf)[0] <= goal for b in self.branches if b.least <= middle
                )
                low, top = (low, middle) if below else (middle, top)
            answer = self.solve(top)
            if answer.iteration_time_s <= seconds:
                return replace(answer, planner_calls=len(self.history))
            low = top

    def price(self, branch: Branch, z: Array, budget: float, best: Use) -> Use:
        """Price all plans of a branch at a point, and return the best that the budget pays by then."""
        branch.priced.append(
            [job.at(z) if branch.points else job.at_start for job in branch.pricings]
        )
        branch.points.append(z)
        best = branch.incumbent(budget, best)
        costs = dict(zip(branch.knobs.names, branch.knobs.cost(z).tolist(), strict=True))
        self.history.append((costs, exp(best.value)))
        return best

    def _answer(self, best: Use, bound: float, budget: float, calls: int, sloped: bool) -> Answer:
        """Return what was found in the units of the figures."""
        _, branch, point, row = best
        knobs, bought = branch.option.knobs, ~branch.is_memory
        z, slopes = np.empty(len(bought)), np.zeros(len(bought))
        z[bought], z[~bought] = branch.points[point], np.log(branch.needs[row])
        if sloped:
            (slopes[bought],) = branch.lines(point, np.array([row]), branch.points[point][None])[1]
        sense, cost = np.array([FIGURES[figure_of(name)][0] for name in knobs.names]), knobs.cost(z)
        most, factor = z >= knobs.high - 1e-9, np.exp(sense * z)
        saved = np.where(most, 0.0, -slopes / (knobs.exponent * cost)) * exp(best.value)

        def by_name(column: Array) -> dict[str, float]:
            return dict(zip(knobs.names, column.tolist(), strict=True))

        plans = [
            p.plan(number) for p, number in zip(branch.pricings, branch.plans[row], strict=True)
        ]
        return Answer(
            branch.option,
            by_name(factor * knobs.reference),
            by_name(factor),
            by_name(cost),
            by_name(sense * slopes),
            by_name(saved),
            [*knobs.only(most).names],
            branch.option.fixed + float(cost.sum()),
            budget,
            exp(best.value),
            exp(bound),
            np.exp(branch.heights(point)[row]).tolist(),
            plans,
            calls,
            exp(best.value - bound) - 1.0,
        )
