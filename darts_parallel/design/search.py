"""Search the best use of a budget by tangents of all plans, with a bound that proves it.

At a point: seconds of all plans of all jobs (one call), and their slopes. Tangents bound every plan
everywhere (`bound`); the next point is where the bound of the most promising plan is lowest, with exactly
the memory that the plan needs. Discrete choices take turns by their bounds, and end once those are above the
best that was found.
Tangents know nothing of budgets: one search serves the whole Pareto front, and the least money that a target
takes: less than that at which the bound itself reaches the target does not.
"""

import time
from dataclasses import dataclass, replace
from itertools import product
from math import exp, inf, log, log1p

import numpy as np
from numpy.typing import NDArray

from darts_parallel.design.bound import Array, Prices, dual_bound
from darts_parallel.design.figures import MEMORY, figure_of
from darts_parallel.design.pricing import Pricing
from darts_parallel.design.request import Design, Knob, Option
from darts_parallel.errors import ConfigError, InfeasibleError
from darts_parallel.plan import Plan

MOST_POINTS = 60
"""Points at which the plans of one discrete choice are priced for one budget."""
MOST_COMBINED = 2_000_000
"""Combinations of plans of several jobs whose bounds are held."""
SLACK = 1e-9
"""Share by which more memory is bought than a plan needs, against rounding."""
Plans = NDArray[np.int64]
"""Combinations of one plan for every job, `(C, J)`."""


class Branch:
    """One discrete choice and its tangents.

    Attributes:
        points: Log goodness `(n,)` of the K points that were priced.
        heights, slopes: Log seconds and their slopes by point and job, `(P,)` and `(P, n)`.
    """

    def __init__(self, option: Option, weights: tuple[float, ...]) -> None:
        self.option, self.weights = option, weights
        self.knobs = tuple(k for k in option.knobs if figure_of(k.name) != MEMORY)
        self.memories = tuple(k for k in option.knobs if figure_of(k.name) == MEMORY)
        self.pricings = [Pricing(problem, self.knobs, self.memories) for problem in option.problems]
        self.prices, self.memory_prices = Prices.of(self.knobs), Prices.of(self.memories)
        self.points: list[Array] = []
        self.heights: list[list[Array]] = []
        self.slopes: list[list[Array]] = []

    def cost(self, *, high: bool = False) -> float:
        """Return the fixed part and the least, or the most, of every knob."""
        ends = ((p.high if high else p.low, p) for p in (self.prices, self.memory_prices))
        return self.option.fixed + sum(float(prices.cost(z).sum()) for z, prices in ends)

    def price_at(self, z: Array) -> None:
        """Price all plans at log goodness `z`, and keep their tangents."""
        found = [pricing.tangents(z) for pricing in self.pricings]
        self.points.append(z)
        self.heights.append([heights for heights, _ in found])
        self.slopes.append([slopes for _, slopes in found])

    def memory_cost(self, needs: Array) -> Array:
        """Return what memory costs at goodness `needs`, `(..., M)`."""
        return np.asarray(self.memory_prices.cost(np.log(needs * (1 + SLACK))).sum(-1))

    def tangents(self, plans: Plans) -> tuple[Array, Array]:
        """Return b `(C, K)` and A `(C, K, n)` of the weighted log seconds of combinations."""
        heights, slopes = [], []
        for z, high, slope in zip(self.points, self.heights, self.slopes, strict=True):
            a = sum((w * slope[j][plans[:, j]] for j, w in enumerate(self.weights)), np.zeros(()))
            t = sum((w * high[j][plans[:, j]] for j, w in enumerate(self.weights)), np.zeros(()))
            slopes.append(a)
            heights.append(t - a @ z)
        return np.stack(heights, 1), np.stack(slopes, 1)

    def needs(self, plans: Plans) -> Array:
        """Return the memory that combinations need, the largest of their jobs, `(C, M)`."""
        own = [pricing.needs[plans[:, job]] for job, pricing in enumerate(self.pricings)]
        return np.asarray(np.max(own, axis=0))

    def incumbent(self, budget: float, best: "BestUse | None") -> "BestUse | None":
        """Return the best that a budget pays at the points so far, where it is better than `best`."""
        limits = np.unique(np.concatenate([pricing.needs for pricing in self.pricings]), axis=0)
        costs = self.memory_cost(limits)
        for index, z in enumerate(self.points):
            money = budget - self.option.fixed - self.prices.cost(z).sum()
            paid = limits[costs <= money * (1 + 1e-12)]
            for limit in paid[-1:] if paid.shape[1] < 2 else paid:  # of one memory, the largest serves all
                times = [
                    np.where((pricing.needs <= limit).all(1), own, inf)
                    for pricing, own in zip(self.pricings, self.heights[index], strict=True)
                ]
                value = float(sum(w * own.min() for w, own in zip(self.weights, times, strict=True)))
                if value < (inf if best is None else best.value):
                    best = BestUse(value, self, index, tuple(int(own.argmin()) for own in times))
        return best

    def lowest(self, budget: float, limit: float) -> tuple[float, Array]:
        """Return the lowest bound that any combination of plans has, and where it is.

        The tangents of a plan bound it one by one, and together only where it may be the lowest.
        """
        plans = self._candidates(budget, limit)
        rest = budget - self.option.fixed - self.memory_cost(self.needs(plans))
        heights, slopes = self.tangents(plans)
        alone = [
            b + self.prices.spend(a, rest)[0] for b, a in zip(heights.T, slopes.swapaxes(0, 1), strict=True)
        ]
        bounds, points = np.max(alone, axis=0, initial=-inf), dict[int, Array]()
        while np.isfinite(bounds).any():
            number = int(bounds.argmin())
            if number in points:
                return float(bounds[number]), points[number]
            value, points[number] = dual_bound(
                self.prices, heights[number], slopes[number], float(rest[number])
            )
            bounds[number] = max(value, bounds[number])
        return inf, self.points[0]

    def _candidates(self, budget: float, limit: float) -> Plans:
        """Return combinations of plans that may be below `limit` if all money were each plan's own."""
        own = []
        for job, pricing in enumerate(self.pricings if len(self.pricings) > 1 else ()):
            rest = budget - self.option.fixed - self.memory_cost(pricing.needs)
            bounds = [t[job] - a[job] @ z + self.prices.spend(a[job], rest)[0]
                      for z, t, a in zip(self.points, self.heights, self.slopes, strict=True)]  # fmt: skip
            own.append(self.weights[job] * np.max(bounds, axis=0))
        if not own:
            return np.arange(len(self.pricings[0].needs))[:, None]
        least = sum(bounds.min() for bounds in own)
        if not np.isfinite(least):
            return np.empty((0, len(own)), dtype=np.int64)
        kept = [np.flatnonzero(bounds < limit - least + bounds.min()) for bounds in own]
        size = int(np.prod([len(k) for k in kept]))
        if size > MOST_COMBINED:
            raise ConfigError(
                f"design.jobs must have at most {MOST_COMBINED} combinations of plans, not {size}; "
                "try fewer jobs, or pins like space.zero_stage=1."
            )
        return np.array(list(product(*kept)), dtype=np.int64).reshape(size, len(kept))


@dataclass(frozen=True)
class BestUse:
    """An incumbent: log seconds, and the branch, the number of its point and the plans that have them."""

    value: float
    branch: Branch
    point: int
    plans: tuple[int, ...]


@dataclass(frozen=True)
class Bought:
    """One knob of an answer."""

    value: float
    """SI units."""
    factor: float
    """Over the reference."""
    cost: float
    elasticity: float
    """d log(seconds) / d log(figure) of the weighted mean; of memory 0."""
    worth: float
    """Share of the seconds that one more unit of money saves here."""


@dataclass(frozen=True)
class Answer:
    """The best use of one budget that was found, and its proof."""

    option: Option
    knobs: dict[str, Bought]
    spent: float
    budget: float
    iteration_time_s: float
    """Seconds; of several jobs their weighted geometric mean."""
    bound_iteration_time_s: float
    """Lower bound over all uses of the budget and all even uniform plans."""
    seconds: tuple[float, ...]
    """Seconds per iteration by job."""
    plans: tuple[Plan, ...]
    """Plans by job."""
    calls: int
    """Points at which all tables were built for this answer; the passes of slopes are as many."""

    @property
    def factors(self) -> dict[str, float]:
        """Return the factors of all knobs."""
        return {name: bought.factor for name, bought in self.knobs.items()}

    @property
    def gap(self) -> float:
        """Return the share by which the seconds may be above the optimum."""
        return self.iteration_time_s / self.bound_iteration_time_s - 1.0


class Designer:
    """A search that keeps its tangents from budget to budget.

    Attributes:
        history: Discrete choice, money by knob, the best seconds so far and the moment in CPU seconds, by
            call: whenever the tables of all jobs were built.

    Errors:
        InfeasibleError: a job fits nowhere.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.history: list[tuple[str, dict[str, float], float, float]] = []
        self._told = 0
        self.branches, refused = list[Branch](), None
        for option in design.options:
            try:
                self.branches.append(Branch(option, design.weights))
            except InfeasibleError as error:
                refused = error
        if not self.branches and refused is not None:
            raise refused
        self.least = min(branch.cost() for branch in self.branches)

    def solve(self, budget: float) -> Answer:
        """Find the best use of a budget.

        Errors:
            ConfigError: the budget is below the fixed part and the least of every knob.
            InfeasibleError: no plan's memory can be paid.
        """
        if self.least > budget:
            raise ConfigError(
                f"design.budget={budget:g} must be above the fixed part and the least of every knob, "
                f"{self.least:g}; try {self.least * 1.2:.3g}."
            )
        branches, best = [b for b in self.branches if b.cost() <= budget], None
        for branch in branches:
            best = branch.incumbent(budget, best)
            if not branch.points:
                best = self.price(branch, branch.pricings[0].start, budget, best)
        bounds, first = dict.fromkeys(branches, -inf), {b: len(b.points) for b in branches}
        open_ = set(branches)
        while open_:
            branch = min(open_, key=lambda b: (bounds[b], branches.index(b)))
            limit = inf if best is None else best.value
            bounds[branch], point = branch.lowest(budget, limit)
            proven = bounds[branch] >= limit - log1p(self.design.tolerance / 2)
            if proven or bounds[branch] == inf or len(branch.points) - first[branch] >= MOST_POINTS:
                open_.remove(branch)
            else:
                best = self.price(branch, point, budget, best)
        if best is None:
            raise InfeasibleError(
                f"design.budget={budget:g} must pay the memory of one plan next to the least of every knob; "
                "try a larger budget, or lower bounds."
            )
        return self._answer(best, budget, min(best.value, *bounds.values()))

    def reach(self, seconds: float) -> Answer:
        """Find the least budget, within the tolerance, for which an iteration takes `seconds`.

        Errors:
            ConfigError: the highest of every knob does not suffice.
        """
        low, high = self.least, max(branch.cost(high=True) for branch in self.branches)
        answer = self.solve(high)
        if answer.iteration_time_s > seconds:
            best = answer.iteration_time_s
            raise ConfigError(f"design.target={seconds:g} must be above what the highest of every knob "
                              f"reaches, {best:.4g} s; try {best * 1.05:.4g}.")  # fmt: skip
        goal, step = log(seconds) - log1p(self.design.tolerance / 2), log1p(self.design.tolerance / 10)
        while True:
            top = high
            while log(top / low) > step:  # what the tangents so far allow at least
                middle = (low * top) ** 0.5
                below = any(b.lowest(middle, inf)[0] <= goal for b in self.branches if b.cost() <= middle)
                low, top = (low, middle) if below else (middle, top)
            answer = self.solve(top)
            if answer.iteration_time_s <= seconds:
                return replace(answer, calls=len(self.history))
            low = top

    def price(self, branch: Branch, z: Array, budget: float, best: BestUse | None) -> BestUse | None:
        """Price all plans of a branch at a point, and return the best that the budget pays by then."""
        branch.price_at(z)
        best = branch.incumbent(budget, best)
        costs = zip((knob.name for knob in branch.knobs), branch.prices.cost(z).tolist(), strict=True)
        seconds = inf if best is None else exp(best.value)
        self.history.append((branch.option.name, dict(costs), seconds, time.process_time()))
        return best

    def _answer(self, best: BestUse, budget: float, bound: float) -> Answer:
        """Return what was found in the units of the figures."""
        branch, plans = best.branch, np.array([best.plans])
        z, chosen = branch.points[best.point], enumerate(best.plans)
        slope = sum(
            w * branch.slopes[best.point][j][p] for w, (j, p) in zip(branch.weights, chosen, strict=True)
        )
        needs = branch.needs(plans)[0] * (1 + SLACK)
        where = {k.name: (y, s) for k, y, s in zip(branch.knobs, z, np.asarray(slope), strict=True)}
        where |= {k.name: (log(need), 0.0) for k, need in zip(branch.memories, needs, strict=True)}
        knobs = {k.name: _bought(k, *map(float, where[k.name])) for k in branch.option.knobs}
        seconds = tuple(exp(branch.heights[best.point][j][p]) for j, p in enumerate(best.plans))
        spent = branch.option.fixed + sum(bought.cost for bought in knobs.values())
        calls, self._told = len(self.history) - self._told, len(self.history)
        return Answer(
            branch.option, knobs, spent, budget, exp(best.value), exp(bound), seconds,
            tuple(p.plan(i) for p, i in zip(branch.pricings, best.plans, strict=True)), calls,
        )  # fmt: skip


def _bought(knob: Knob, z: float, slope: float) -> Bought:
    """Return a knob at log goodness `z`, where log seconds have this slope."""
    cost, factor = knob.price * exp(knob.exponent * z), exp(knob.sense * z)
    return Bought(factor * knob.reference, factor, cost, knob.sense * slope, -slope / (knob.exponent * cost))
