"""The end of a bilevel search: the logits' own plan, the proven optimum of what was learned, and checks.

`log T + S` with T seconds and S log slowdown is quasi-concave, so its least value over all plans lies at a
corner of the convex hull of their points (S, T), and every such corner is the plan of least `T + m S` for
some price m of a log step in seconds. For a given m that is an ordinary problem of the exact planner, with
`m S` among the seconds that are paid once. Prices between two solved ones are excluded by the corner of their
supporting lines (the bisection of Eisner and Severance 1976, Journal of the ACM 23(4), with bounds).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from darts_parallel.bilevel._relaxed_plans import JointPlan, price_plans
from darts_parallel.bilevel.joint_space import (
    EXACT_BITS,
    FIRST_BLOCK,
    Bits,
    Candidate,
    JointSpace,
    LogSlowdown,
    at_batch,
    with_bits,
    with_fixed_bits,
)
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.cost import LOSSLESS, CostTable
from darts_parallel.exact import DeadlineError, Verification, find_layerwise_plan, find_uniform_plan
from darts_parallel.gradient import PlanStage, SearchResult, StepRecord, explain_infeasible
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

AGREEMENT = 1e-7
"""Differences of the objective below this are rounding."""
SAME = 1e-12
"""Relative difference of two prices, or difference of two log slowdowns, that is none."""
SAME_OBJECTIVE = 1e-9
"""Relative gap below which the logits' own plan is the optimum."""
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

    def level_at(self, price: float) -> float:
        """Return `T + m S` of this corner's plan at another price."""
        return self.level + (price - self.price) * self.plan.log_slowdown


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
        number = self.numbers[answer.best.table]
        found = price_plans(self.space, number, answer.best.plan, self.prices)
        assert found is not None
        return _Corner(price, found.seconds + price * found.log_slowdown, found)

    def _priced(self, table: CostTable, price: float) -> CostTable:
        steps = self.prices.on_choices(table.choices, table.num_layers, FIRST_BLOCK)
        return replace(table, per_iteration=table.per_iteration + price * steps)


def find_learned_optimum(
    space: JointSpace,
    prices: LogSlowdown,
    budget: float,
) -> LearnedOptimum:
    """Find the best plan of the space by the learned objective.

    Args:
        budget: Wall-clock seconds; after them the best plan found stands without a proof.
    """
    deadline = time.monotonic() + budget
    best: JointPlan | None = None
    bound = float("inf")
    proven = True
    plans = 0
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
            incumbent = min(low.level_at(price), high.level_at(price))
            middle = problem.corner(price, incumbent)
            if middle is None:
                continue
            best = min(best, middle.plan, key=lambda plan: plan.value)
            intervals += [(low, middle), (middle, high)]
    except DeadlineError:
        return best, None
    return best, best.value - AGREEMENT


def _excluded(
    low: _Corner,
    high: _Corner,
    best: JointPlan,
) -> bool:
    """Tell whether no plan between two prices can be better than the best one.

    Such plans lie above both supporting lines `T + m S = level`, so in the triangle of the two corners and
    the lines' crossing, where a quasi-concave objective is least at a vertex.
    """
    if high.price <= low.price * (1.0 + SAME):
        return True
    if abs(low.plan.log_slowdown - high.plan.log_slowdown) < SAME:
        return True
    steps = (high.level - low.level) / (high.price - low.price)
    seconds = low.level - low.price * steps
    return seconds > 0.0 and log(seconds) + steps >= best.value - AGREEMENT


def _next_price(
    low: _Corner,
    high: _Corner,
    best: JointPlan,
) -> float:
    """Return the slope of the objective at the best plan where it lies inside, else that of the chord."""
    inside = low.price * (1.0 + 1e-9) < best.seconds < high.price * (1.0 - 1e-9)
    if inside:
        return best.seconds
    rise = low.plan.log_slowdown - high.plan.log_slowdown
    chord = (high.plan.seconds - low.plan.seconds) / rise
    return min(max(chord, low.price * (1.0 + 1e-9)), high.price)


@dataclass(frozen=True)
class BilevelPlan:
    """A hard plan and its prices."""

    plan: Plan
    blocks: tuple[Candidate, ...]
    global_batch_size: int
    seconds: float
    """Predicted seconds a step."""
    log_slowdown: float = float("nan")
    """Learned, up to a constant that all plans share; not a number where nothing was learned of it."""

    @staticmethod
    def of(space: JointSpace, priced: JointPlan) -> "BilevelPlan":
        """Read a priced plan."""
        plan = space.to_plan(priced.table, priced.plans)
        batch = space.batch_of[priced.table]
        return BilevelPlan(plan, space.blocks_of(plan), batch, priced.seconds, priced.log_slowdown)

    def problem(self, problem: Problem) -> Problem:
        """Set the plan's global batch size."""
        return at_batch(problem, self.global_batch_size)


@dataclass(frozen=True)
class Conclusion:
    """Result of one search."""

    raw: BilevelPlan | None
    """The plan that the logits themselves round to; None where that does not fit the memory."""
    chosen: BilevelPlan
    """The better of the logits' own plan and the exact optimum of the learned objective."""
    proven: bool
    """Whether no plan of the space is better by the learned objective."""
    plans_evaluated: int
    prices: LogSlowdown
    seconds: float
    """Wall-clock seconds of the search, trials and exact optimum included."""
    stopped_by: str | None = None
    """`user` where Ctrl-C ended the search early."""

    @property
    def raw_gap(self) -> float | None:
        """How much longer the logits' own plan takes to the target than the chosen one, as a fraction."""
        if self.raw is None:
            return None
        steps = exp(self.raw.log_slowdown - self.chosen.log_slowdown)
        return self.raw.seconds / self.chosen.seconds * steps - 1.0


def conclude(search: BilevelSearch, stopped_by: str | None = None) -> Conclusion:
    """Round the logits and solve the learned objective exactly; without any prices take 16 bits.

    Args:
        search: At its end, or where Ctrl-C stopped it.
        stopped_by: `user` after Ctrl-C.

    Errors:
        InfeasibleError: no plan of the space fits the memory.
    """
    space = search.space
    prices = search.log_slowdown
    raw = None
    proven = False
    evaluated = search.upper.evaluated
    if search.priced:
        rounded = search.upper.best_plan(prices)
        optimum = find_learned_optimum(space, prices, search.settings.exact_seconds)
        proven = optimum.proven
        evaluated += optimum.plans_evaluated
        raw = None if rounded is None else BilevelPlan.of(space, rounded)
        found = [plan for plan in (optimum.plan, rounded) if plan is not None]
        best = min(found, key=lambda plan: plan.value, default=None)
        chosen = None if best is None else BilevelPlan.of(space, best)
    else:
        chosen = uniform_plan(search, LOSSLESS, LOSSLESS)
    if chosen is None:
        raise explain_infeasible(search.problem, list(space.whole))
    seconds = time.perf_counter() - search.began
    return Conclusion(raw, chosen, proven, evaluated, prices, seconds, stopped_by)


def uniform_plan(
    search: BilevelSearch,
    sums: int,
    sent: int,
) -> BilevelPlan | None:
    """Return the fastest plan whose blocks all send `sums` and `sent` bits; None where none fits."""
    settings = search.settings
    batch = min(settings.batches, key=lambda size: size != settings.global_batch_size)
    blocks = (Candidate(1, 1, sums, sent),) * settings.num_blocks
    return fixed_bits_optimum(search.space, blocks, batch, settings.exact_seconds)


def fixed_bits_optimum(
    space: JointSpace,
    blocks: Sequence[Candidate],
    batch: int,
    budget: float,
) -> BilevelPlan | None:
    """Return the fastest plan of all whose blocks send the bits of the given ones; None where none fits.

    Args:
        blocks: Candidates with the bits; their degrees are free.
    """
    tables, bits = _at_fixed_bits(space, blocks, batch)
    best = find_layerwise_plan(tables, "layerwise", deadline=time.monotonic() + budget).best
    if best is None:
        return None
    number = space.of_batch(batch)[best.table]
    plan = space.canonicalized(with_bits(best.to_plan(tables), bits), number)
    return BilevelPlan(plan, space.blocks_of(plan), batch, best.time)


def _at_fixed_bits(
    space: JointSpace,
    blocks: Sequence[Candidate],
    batch: int,
) -> tuple[list[CostTable], list[Bits]]:
    """Return the tables of a global batch size with the blocks' bits fixed, and the bits of all layers."""
    edges = [EXACT_BITS] * (space.num_layers - len(blocks) - 1)
    inside = [(block.tp_comm_bits, block.grad_comm_bits) for block in blocks]
    bits = [EXACT_BITS, *inside, *edges]
    numbers = space.of_batch(batch)
    return [with_fixed_bits(space.whole[number], bits) for number in numbers], bits


def verify(
    space: JointSpace,
    found: BilevelPlan,
    budget: float,
) -> list[Verification]:
    """Solve by exhaustive search and by dynamic programming over (dp, tp, pp, ...) at the plan's bits."""
    entries = []
    uniform = None
    tables, bits = _at_fixed_bits(space, found.blocks, found.global_batch_size)
    for name, kind in (("exhaustive", "uniform"), ("dynamic_programming", "layerwise")):
        began = time.monotonic()
        if kind == "uniform":
            answer = uniform = find_uniform_plan(tables, deadline=began + budget)
        else:
            answer = find_layerwise_plan(tables, kind, deadline=began + budget, uniform=uniform)
        result = answer.verification(tables, time.monotonic() - began, name, kind)
        plan = None if result.plan is None else with_bits(result.plan, bits)
        note = f"{result.note}, at the plan's bits" if result.note else "at the plan's bits"
        entries.append(replace(result, plan=plan, note=note).with_gap(found.seconds))
    return entries


def search_result(
    search: BilevelSearch,
    found: Conclusion,
    history: Sequence[StepRecord],
) -> SearchResult:
    """Describe the search as `plan.json` and the report do."""
    raw = found.raw or found.chosen
    told: dict[str, Any] = {"plan": found.chosen.plan, "raw_plan": raw.plan}
    if found.raw is not None:
        told["stages"] = (PlanStage("repaired", raw.seconds, fits=True),)
    told["iteration_time_s"] = found.chosen.seconds
    told["raw_iteration_time_s"] = raw.seconds
    told["seconds"] = found.seconds
    told["steps"] = search.trainer.step
    told["restarts"] = search.settings.num_restarts
    told["seed"] = search.settings.seed
    told["plans_evaluated"] = found.plans_evaluated
    told["stopped_by"] = found.stopped_by
    told["why"] = _why(search, found)
    return SearchResult(alternatives=(), history=tuple(history), method="bilevel", **told)


def _why(search: BilevelSearch, found: Conclusion) -> str:
    """Say which plan was chosen, in a clause."""
    if not search.priced:
        return "nothing is known yet of quantized collectives"
    gap = found.raw_gap
    own = gap is not None and gap < SAME_OBJECTIVE
    plan = "the logits' own plan" if own else "the learned objective's optimum"
    return f"{plan}, least learned time to target"
