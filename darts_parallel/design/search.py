"""Search the best use of a budget by tangents of all plans, with a bound that proves it.

At a point: seconds of all plans of all jobs (one call), and their slopes. Tangents bound every plan
everywhere (`bound`); the next point is where the bound of the most promising plan is lowest, with exactly
the memory that the plan needs. Discrete choices take turns by their bounds, and end once those are above the
best that was found.
Tangents know nothing of budgets: one search serves the whole Pareto front.
"""

from dataclasses import dataclass, field
from itertools import product
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from darts_parallel.design.bound import Array, Prices, dual_bound
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


@dataclass
class Branch:
    """One discrete choice and its tangents."""

    option: Option
    weights: tuple[float, ...]
    pricings: list[Pricing] = field(init=False)
    points: list[Array] = field(default_factory=list)
    heights: list[list[Array]] = field(default_factory=list)
    """Log seconds by point and job, each `(P,)`."""
    slopes: list[list[Array]] = field(default_factory=list)
    """Slopes by point and job, each `(P, n)`."""

    def __post_init__(self) -> None:
        knobs = self.option.knobs
        self.knobs = tuple(k for k in knobs if not k.is_memory)
        self.memories = tuple(k for k in knobs if k.is_memory)
        self.pricings = [Pricing(p, self.knobs, self.memories) for p in self.option.problems]
        self.prices = _prices(self.knobs)

    @property
    def least(self) -> float:
        """Return the fixed part and the least of every knob."""
        light = float(self.memory_cost(np.array([k.low for k in self.memories])))
        return self.option.fixed + float(self.prices.cost(self.prices.low).sum()) + light

    def price_at(self, z: Array) -> None:
        """Price all plans at log goodness `z`, and keep their tangents."""
        self.points.append(z)
        self.heights.append([pricing.log_seconds(z) for pricing in self.pricings])
        self.slopes.append([pricing.slopes(z) for pricing in self.pricings])

    def memory_cost(self, needs: Array) -> Array:
        """Return what memory costs at goodness `needs`, `(..., M)`."""
        prices = np.array([k.price for k in self.memories])
        exponents = np.array([k.exponent for k in self.memories])
        return np.asarray((prices * needs**exponents).sum(-1))

    def combined_needs(self, plans: NDArray[np.int64]) -> Array:
        """Return the memory that combinations `(C, J)` need, the largest of their jobs, `(C, M)`."""
        own = [pricing.needs[plans[:, job]] for job, pricing in enumerate(self.pricings)]
        return np.asarray(np.max(own, axis=0))

    def tangents(self, plans: NDArray[np.int64]) -> tuple[Array, Array]:
        """Return b `(C, K)` and A `(C, K, n)` of the weighted log seconds of combinations `(C, J)`."""
        heights, slopes = [], []
        for z, high, slope in zip(self.points, self.heights, self.slopes, strict=True):
            a = sum(w * slope[j][plans[:, j]] for j, w in enumerate(self.weights))
            t = sum(w * high[j][plans[:, j]] for j, w in enumerate(self.weights))
            slopes.append(np.asarray(a))
            heights.append(np.asarray(t - a @ z))
        return np.stack(heights, 1), np.stack(slopes, 1)


@dataclass(frozen=True)
class Answer:
    """The best use of one budget that was found, and its proof."""

    option: Option
    factors: dict[str, float]
    """Factors of every knob, relative to its reference."""
    spent: float
    budget: float
    log_seconds: float
    """Weighted mean of the jobs' log seconds."""
    bound: float
    """Lower bound of `log_seconds` over the named space."""
    seconds: tuple[float, ...]
    """Seconds per iteration by job."""
    plans: tuple[Plan, ...]
    """Plans by job."""
    elasticities: dict[str, float]
    """d log(seconds) / d log(figure) of the weighted mean; of memory 0."""
    costs: dict[str, float]
    """Money by knob."""
    calls: int
    """Times that all tables were built for this answer, those of slopes apart."""
    slope_passes: int

    @property
    def iteration_time_s(self) -> float:
        """Return the seconds per iteration; of several jobs, their weighted geometric mean."""
        return exp(self.log_seconds)

    @property
    def bound_iteration_time_s(self) -> float:
        """Return the lower bound of `iteration_time_s` over the named space."""
        return exp(self.bound)

    @property
    def gap(self) -> float:
        """Return the share by which the seconds may be above the optimum."""
        return exp(self.log_seconds - self.bound) - 1.0

    def worth(self) -> dict[str, float]:
        """Return the share of the seconds that one more unit of money saves at every knob."""
        found = {}
        for knob in self.option.knobs:
            slope = -knob.sense * self.elasticities[knob.name]
            found[knob.name] = slope / (knob.exponent * self.costs[knob.name])
        return found


Found = tuple[float, Branch, Array, tuple[int, ...]]
"""Log seconds, branch, point and plans of an incumbent."""


@dataclass
class _Front:
    """Bounds of the combinations of one branch's plans for one budget."""

    plans: NDArray[np.int64]
    money: Array
    """Money left for knobs other than memory, `(C,)`."""
    bounds: Array


class Designer:
    """A search that keeps its tangents from budget to budget.

    Attributes:
        calls: Times that the tables of all jobs were built.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self.branches = _fitting([Branch(option, design.weights) for option in design.options])
        self.calls = 0
        self.slope_passes = 0

    @property
    def least(self) -> float:
        """Return what the cheapest discrete choice costs with the least of every knob."""
        return min(branch.least for branch in self.branches)

    def solve(self, budget: float) -> Answer:
        """Find the best use of a budget.

        Errors:
            ConfigError: the budget is below the fixed part and the least of every knob.
            InfeasibleError: a job fits nowhere, or no plan's memory can be paid.
        """
        calls, passes = self.calls, self.slope_passes
        branches = self._affordable(budget)
        best = self._first_incumbent(branches, budget)
        bounds, visits = dict.fromkeys(range(len(branches)), -inf), [0] * len(branches)
        candidates = set(bounds)
        while candidates:
            number = min(candidates, key=lambda n: bounds[n])
            branch, limit = branches[number], inf if best is None else best[0]
            bounds[number], point = self._lowest(branch, self._front(branch, budget, limit))
            done = bounds[number] >= limit - log(1.0 + self.design.tolerance / 2)
            if done or point is None or visits[number] >= MOST_POINTS:
                candidates.remove(number)
                continue
            self._price(branch, point)
            visits[number] += 1
            best = self._incumbent(branch, budget, limit) or best
        if best is None:
            raise InfeasibleError(
                f"design.budget={budget:g} must pay the memory of one plan next to the least of every knob; "
                "try a larger budget, or lower bounds."
            )
        bound = min([best[0], *bounds.values()])
        return self._answer(best, budget, bound, self.calls - calls, self.slope_passes - passes)

    def _first_incumbent(self, branches: list[Branch], budget: float) -> Found | None:
        """Price every branch at its reference once, and return the best that the budget pays already."""
        best: Found | None = None
        for branch in branches:
            if not branch.points:
                reference = np.zeros(len(branch.knobs))
                self._price(branch, np.clip(reference, branch.prices.low, branch.prices.high))
            best = self._incumbent(branch, budget, inf if best is None else best[0]) or best
        return best

    def _affordable(self, budget: float) -> list[Branch]:
        """Return the branches whose fixed part and least knobs a budget pays."""
        if self.least > budget:
            raise ConfigError(
                f"design.budget={budget:g} must be above the fixed part and the least of every knob, "
                f"{self.least:g}; try {self.least * 1.2:.3g}."
            )
        return [branch for branch in self.branches if branch.least <= budget]

    def _price(self, branch: Branch, z: Array) -> None:
        branch.price_at(z)
        self.calls += 1
        self.slope_passes += len(branch.knobs)

    def _incumbent(self, branch: Branch, budget: float, limit: float) -> Found | None:
        """Return the best that the budget pays at a branch's points, if it is below `limit`."""
        found: Found | None = None
        for z, heights in zip(branch.points, branch.heights, strict=True):
            money = budget - branch.option.fixed - branch.prices.cost(z).sum()
            chosen = self._best_fitting(branch, heights, money)
            if chosen is None:
                continue
            value = sum(w * h[p] for w, h, p in zip(branch.weights, heights, chosen, strict=True))
            if value < limit:
                limit, found = float(value), (float(value), branch, z, chosen)
        return found

    def _best_fitting(self, branch: Branch, heights: list[Array], money: float) -> tuple[int, ...] | None:
        """Return the fastest plans of all jobs whose memory `money` pays; of several, the largest counts."""
        needs = [pricing.needs for pricing in branch.pricings]
        limits = np.concatenate(needs) if branch.memories else np.zeros((1, 0))
        affordable = limits[branch.memory_cost(limits * (1 + SLACK)) <= money * (1 + 1e-12)]
        best, value = None, inf
        for limit in affordable if len(needs) > 1 else affordable[:0]:
            times = [np.where((n <= limit).all(1), h, inf) for n, h in zip(needs, heights, strict=True)]
            total = sum(w * t.min() for w, t in zip(branch.weights, times, strict=True))
            if total < value:
                value, best = total, tuple(int(t.argmin()) for t in times)
        if len(needs) == 1:
            fits = branch.memory_cost(needs[0] * (1 + SLACK)) <= money * (1 + 1e-12)
            times = [np.where(fits, heights[0], inf)]
            return (int(times[0].argmin()),) if fits.any() else None
        return best

    def _front(self, branch: Branch, budget: float, limit: float) -> _Front:
        """Return combinations of plans that may be below `limit`, bounded by their best single tangent."""
        alone = [self._bounds_alone(branch, job, budget) for job in range(len(branch.weights))]
        least = [w * a.min() for w, a in zip(branch.weights, alone, strict=True)]
        kept = []
        for job, (w, own) in enumerate(zip(branch.weights, alone, strict=True)):
            others = sum(least[:job] + least[job + 1 :])
            kept.append(np.flatnonzero((w * own + others < limit) & np.isfinite(own)))
        size = int(np.prod([len(k) for k in kept]))
        if size > MOST_COMBINED:
            raise ConfigError(
                f"design.jobs must have at most {MOST_COMBINED} combinations of plans, not {size}; "
                "try fewer jobs, or pins like space.zero_stage=1."
            )
        plans = np.array(list(product(*kept)), dtype=np.int64).reshape(size, len(kept))
        rest = budget - branch.option.fixed - branch.memory_cost(branch.combined_needs(plans) * (1 + SLACK))
        heights, slopes = branch.tangents(plans)
        bounds = np.full(size, -inf)
        for k in range(heights.shape[1]):
            bounds = np.maximum(bounds, heights[:, k] + branch.prices.spend(slopes[:, k], rest)[0])
        return _Front(plans, rest, bounds)

    def _bounds_alone(self, branch: Branch, job: int, budget: float) -> Array:
        """Return the bounds of one job's plans as if all money were theirs, `(P,)`."""
        needs = branch.pricings[job].needs
        rest = budget - branch.option.fixed - branch.memory_cost(needs * (1 + SLACK))
        bounds = np.full(len(needs), -inf)
        for z, heights, slopes in zip(branch.points, branch.heights, branch.slopes, strict=True):
            a = slopes[job]
            bounds = np.maximum(bounds, heights[job] - a @ z + branch.prices.spend(a, rest)[0])
        return bounds

    def _lowest(self, branch: Branch, front: _Front) -> tuple[float, Array | None]:
        """Return the lowest bound from all tangents together, and where it is; refines the lowest only."""
        if not len(front.bounds) or not np.isfinite(front.bounds).any():
            return inf, None
        points: dict[int, Array] = {}
        while True:
            number = int(front.bounds.argmin())
            if number in points:
                return float(front.bounds[number]), points[number]
            if not np.isfinite(front.bounds[number]):
                return inf, None
            heights, slopes = branch.tangents(front.plans[number : number + 1])
            value, point = dual_bound(branch.prices, heights[0], slopes[0], float(front.money[number]))
            front.bounds[number] = max(value, front.bounds[number])
            points[number] = point

    def _answer(
        self,
        best: tuple[float, Branch, Array, tuple[int, ...]],
        budget: float,
        bound: float,
        calls: int,
        passes: int,
    ) -> Answer:
        """Return what was found in the units of the figures."""
        value, branch, z, chosen = best
        index = next(i for i, point in enumerate(branch.points) if point is z)
        plans = np.array([chosen], dtype=np.int64)
        needs = branch.combined_needs(plans)[0] * (1 + SLACK)
        slope = sum(w * branch.slopes[index][j][chosen[j]] for j, w in enumerate(branch.weights))
        factors, costs, elasticities = {}, {}, {}
        for number, knob in enumerate(branch.knobs):
            factors[knob.name] = float(np.exp(knob.sense * z[number]))
            costs[knob.name] = float(branch.prices.cost(z)[number])
            elasticities[knob.name] = knob.sense * float(np.asarray(slope)[number])
        for number, knob in enumerate(branch.memories):
            factors[knob.name] = float(needs[number])
            costs[knob.name] = knob.price * float(needs[number]) ** knob.exponent
            elasticities[knob.name] = 0.0
        order = [knob.name for knob in branch.option.knobs]
        seconds = tuple(float(np.exp(branch.heights[index][j][p])) for j, p in enumerate(chosen))
        spent = branch.option.fixed + sum(costs.values())
        return Answer(
            branch.option, {n: factors[n] for n in order}, spent, budget, value, bound,
            seconds, tuple(p.plan(i) for p, i in zip(branch.pricings, chosen, strict=True)),
            {n: elasticities[n] for n in order}, {n: costs[n] for n in order}, calls, passes,
        )  # fmt: skip


def _fitting(branches: list[Branch]) -> list[Branch]:
    """Return the branches on which every job fits somewhere.

    Errors:
        InfeasibleError: there is none.
    """
    kept, refused = [], None
    for branch in branches:
        try:
            if all(pricing.needs is not None for pricing in branch.pricings):
                kept.append(branch)
        except InfeasibleError as error:
            refused = error
    if not kept and refused is not None:
        raise refused
    return kept


def _prices(knobs: tuple[Knob, ...]) -> Prices:
    """Return the prices of knobs in the log of their goodness."""
    columns = ("price", "exponent", "low", "high")
    price, exponent, low, high = (np.array([getattr(k, c) for k in knobs], dtype=float) for c in columns)
    return Prices(price, exponent, np.log(low), np.log(high))
