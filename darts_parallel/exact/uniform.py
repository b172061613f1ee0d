"""The uniform space by enumeration: one strategy for all layers, any split into stages.

Every configuration (stages, micro-batches, strategy) is bounded by its mean stages. In the order of these
bounds, each outer choice is bounded again by separate minima of the sum, bottleneck and gradient-sync terms.
A configuration whose bound is below the best plans so far is solved exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost import (
    BOUND_TOLERANCE,
    COST_TOLERANCE,
    SOLVER_MEMORY_TOLERANCE,
    Array,
    Bools,
    CostTable,
    HardPlans,
    Index,
    OuterCosts,
    PricedPlan,
    Tables,
    evaluate_batch,
    even_uniform_plans,
    fastest,
    filled,
    kept_bytes,
    lightest_plans,
)
from darts_parallel.exact.bounds import OuterBound, least_bound, rising_bounds, spread_bounds
from darts_parallel.exact.chosen_stages import ChosenStages
from darts_parallel.exact.outer_choice import OuterChoiceSolver
from darts_parallel.exact.result import (
    Check,
    DeadlineError,
    TableResult,
    deadline_check,
    too_large_note,
    unknown_costs,
)
from darts_parallel.exact.segments import StageSegments, too_many_segments

EVEN_ONLY = "optimal but for interleaved plans of uneven stages, which are bounded only"
Levels = Sequence[Tables]
"""Tables of several levels of memory."""
PlanRule = Callable[[PricedPlan], bool]
"""Whether a plan is accepted."""
MAX_ELEMENTS = 2_000_000
"""Segments of configurations that are bounded at once: 16 MB an array."""


def find_uniform_plan(
    tables: Tables,
    incumbent: float = inf,
    deadline: float = inf,
    *,
    count: int = 1,
    even: bool = False,
) -> TableResult:
    """Return the optimal uniform plan over all tables, and the best of the next configurations.

    Args:
        incumbent: Cost of a known plan; plans above it are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
        count: Configurations (stages, micro-batches, strategy) to rank; each with its best split.
        even: Interleaved plans have equal chunks; else those of unequal ones are bounded only.

    Returns:
        The best plan; `alternatives` holds the `count` best configurations, the best plan first.
    """
    return find_uniform_within([tables], bool, incumbent, deadline, count, even)


def find_uniform_within(
    levels: Levels,
    keeps: PlanRule,
    incumbent: float,
    deadline: float,
    count: int,
    even: bool,
) -> TableResult:
    """Return the optimal uniform plan of which `keeps` is true at some level of memory.

    Without interleaving a configuration has the first of its best splits that `keeps` accepts, and
    else its best split at the last level.

    Args:
        levels: Tables that differ in the memory alone, most memory first.
        incumbent: As the other arguments: of `find_uniform_plan`.
    """
    tables = levels[-1]
    unknown = unknown_costs(tables)
    if unknown:
        return TableResult(None, least_bound(tables, "uniform"), False, 0, note=unknown)
    check = deadline_check(deadline)
    ranking = _Ranking(count, incumbent * (1 + COST_TOLERANCE))
    interleaved = {number: table for number, table in enumerate(tables) if table.virtual_stages > 1}
    bounds = rising_bounds(interleaved, "layerwise")
    complete = _rank_interleaved(tables, bounds, ranking, check)
    settled = not interleaved or (even and complete)
    search = _Search(levels, ranking, check, keeps)
    complete = search.run()
    floor = search.floor(complete)
    note = search.note(complete)
    proven = complete and not note
    if not settled:
        if proven:
            note = EVEN_ONLY
        floor = min(floor, bounds[0].seconds)
    return TableResult(
        ranking.best,
        floor,
        proven and settled,
        search.effort,
        tuple(ranking.plans),
        note=note,
    )


@dataclass
class _Ranking:
    """The best plans so far."""

    count: int
    """Plans that are wanted."""
    ceiling: float
    """Seconds that no plan may exceed."""
    plans: list[PricedPlan] = field(default_factory=list)
    """Cheapest first, at most `count`."""

    @property
    def best(self) -> PricedPlan | None:
        """The cheapest plan."""
        return self.plans[0] if self.plans else None

    @property
    def floor(self) -> float:
        """Seconds that no plan undercuts once all have been looked at."""
        return self.plans[0].time if self.plans else self.ceiling

    @property
    def limit(self) -> float:
        """Seconds above which a plan is not among the best."""
        if len(self.plans) < self.count:
            return self.ceiling
        return self.plans[-1].time

    def add(self, plan: PricedPlan) -> None:
        """Put a plan in its place; of a configuration only the fastest plan stays."""
        plans = sorted([*self.plans, plan], key=lambda known: known.time)
        names = [(known.outer, int(known.plan.choices[0, 0])) for known in plans]
        fastest = [known for i, known in enumerate(plans) if names[i] not in names[:i]]
        self.plans = fastest[: self.count]


def _rank_interleaved(
    tables: Tables,
    bounds: list[OuterBound],
    ranking: _Ranking,
    check: Check,
) -> bool:
    """Add the best interleaved plans of even stages; return whether time sufficed.

    Even are all layers, or all but the first and the last.
    """
    try:
        for bound in bounds:
            if bound.seconds > ranking.limit or bound.seconds == inf:
                break
            check()
            _rank_simple(tables, bound, ranking)
    except DeadlineError:
        return False
    return True


def _rank_simple(
    tables: Tables,
    bound: "OuterBound | _Entry",
    ranking: _Ranking,
) -> None:
    """Add an outer choice's best plans of even stages; without interleaving also the lightest."""
    limit = ranking.limit
    one = tables[bound.table].select([bound.outer])
    splits = [even_uniform_plans(one, ends_apart=apart) for apart in (True, False)]
    if one.virtual_stages == 1:
        splits += lightest_plans([one], "uniform")
    # what the mean work of a device excludes is not simulated
    layers = one.time[0].detach().amin(0)
    work = layers.sum(0) * one.num_micro_batches / one.pp
    for plans in splits:
        plans = plans[work[plans.choices[:, 0]] <= limit]
        seconds = evaluate_batch(one, plans).fitting_seconds
        best = seconds.argsort(stable=True)[: ranking.count]
        for row in best.tolist():
            if seconds[row] <= limit and seconds[row] < inf:
                outer = torch.tensor([bound.outer])
                plan = replace(plans[row : row + 1], outer=outer)
                ranking.add(PricedPlan(bound.table, plan, float(seconds[row])))


class _Entry(NamedTuple):
    """A configuration in the order of bounds; at first a whole outer choice with its least bound."""

    bound: float
    table: int
    outer: int
    choice: int
    """Strategy; `EVERY` for a whole outer choice."""
    level: int = 0
    """Number of the tables in `_Search.levels`."""


EVERY = -1
"""Stands for all strategies of an outer choice."""


class _Search:
    """State of the search over configurations without interleaving."""

    def __init__(
        self,
        levels: Levels,
        ranking: _Ranking,
        check: Check,
        keeps: PlanRule,
    ) -> None:
        self.levels = levels
        """The tables with more and less memory, most first; bounds of the first ones hold for all."""
        self.tables = levels[-1]
        self.keeps = keeps
        self.ranking = ranking
        self.check = check
        self.reached = 0.0
        """Configurations of lower bounds are settled."""
        even = _even_seconds(self.tables, ranking.count)
        self.known = min(even * (1 + COST_TOLERANCE), ranking.ceiling)
        """Seconds that the wanted plans need at most."""
        self.quick: dict[tuple[int, int], _QuickBounds] = {}
        """Quick bounds by table and outer choice."""
        for number, table in enumerate(levels[0]):
            if table.virtual_stages == 1:
                for outer, quick in _quick_bounds(table):
                    self.quick[number, outer] = quick
        self.effort = sum(len(quick.seconds) for quick in self.quick.values())
        self.too_large: list[_Entry] = []
        """Outer choices that stay unsolved; their even plans are ranked."""
        entries = []
        for (number, outer), quick in self.quick.items():
            least = float(quick.seconds.min())
            entries.append(_Entry(least, number, outer, EVERY))
        self.outer_choices = sorted(entries)
        self.queue = list(self.outer_choices)

    def run(self) -> bool:
        """Settle configurations in the order of bounds; return whether time sufficed."""
        try:
            while self.queue:
                entry = heappop(self.queue)
                self.reached = entry.bound
                if entry.bound > self.ranking.limit or entry.bound == inf:
                    break
                if entry.choice == EVERY:
                    self._bound_each(entry)
                else:
                    self._solve(entry)
        except DeadlineError:
            # before the first plan one is found, whatever outer choice has it
            for entry in self.outer_choices:
                if self.ranking.plans:
                    break
                _rank_simple(self.tables, entry, self.ranking)
            return False
        return True

    def floor(self, complete: bool) -> float:
        """Return seconds that no plan undercuts; `complete`: the time sufficed."""
        bounds = [entry.bound for entry in self.too_large]
        if not complete:
            bounds.append(self.reached)
        return min([self.ranking.floor, *bounds])

    def note(self, complete: bool) -> str:
        """Name outer choices that are too large and may have a better plan; `complete`: as in `floor`."""
        floor = self.ranking.floor
        left = [entry for entry in self.too_large if entry.bound < floor]
        parts = ((self.tables[entry.table], entry.outer) for entry in left)
        return too_large_note(parts, not complete)

    def _bound_each(self, entry: _Entry) -> None:
        """Queue the strategies of an outer choice by tighter bounds, or set a too large one aside."""
        table = self.tables[entry.table]
        loosest = self.levels[0][entry.table]
        quick = self.quick[entry.table, entry.outer]
        held = stages_hold(OuterCosts.whole(loosest, entry.outer), quick.choices)
        if not held.any():
            return
        if too_many_segments(table.pp, table.num_layers):
            self.too_large.append(entry)
            _rank_simple(self.tables, entry, self.ranking)
            return
        fast = quick.seconds <= min(self.ranking.limit, self.known)
        choices = quick.choices[held & fast]
        tighter = uniform_bounds(loosest, entry.outer, choices, self.check)
        for bound, choice in zip(tighter.tolist(), choices.tolist(), strict=True):
            each = entry._replace(bound=bound, choice=choice)
            heappush(self.queue, each)

    def _solve(self, entry: _Entry) -> None:
        """Add the best split of a configuration, by a rising limit of its own."""
        choices = np.array([entry.choice])
        table = self.levels[entry.level][entry.table]
        even = _balanced_split(table, entry)
        plan: PricedPlan | None = even
        if even.time > entry.bound * (1 + COST_TOLERANCE):
            solver = OuterChoiceSolver(table, entry.table, entry.outer, entry.bound, choices)
            limit = min(self.ranking.limit, even.time * (1 + COST_TOLERANCE))
            plan = solver.solve("stagewise", limit, self.check)
            self.effort += solver.labels
        if plan is None:
            return
        level = entry.level + 1
        # where it fits, too, it is the best split, and no more likely to be accepted
        while level < len(self.levels):
            tighter = self.levels[level][entry.table]
            if fastest(entry.table, tighter, plan.plan).time == inf:
                break
            level += 1
        if level == len(self.levels) or self.keeps(plan):
            self.ranking.add(plan)
            return
        (bound,) = uniform_bounds(tighter, entry.outer, choices, self.check)
        heappush(self.queue, entry._replace(bound=bound, level=level))


def _balanced_split(table: CostTable, entry: _Entry) -> PricedPlan:
    """Return the split of a configuration whose slowest stage is fastest; it fits where any split does."""
    costs = OuterCosts.whole(table, entry.outer)
    stages = ChosenStages.uniform(costs, entry.choice)
    starts = stages.segments.even_split(_stage_terms(stages)[:, 2])
    plan = HardPlans.one(entry.outer, [entry.choice] * costs.num_layers, starts)
    return fastest(entry.table, table, plan)


def _even_seconds(tables: Tables, count: int) -> float:
    """Return the seconds of the `count`-th best plan of even stages; infinite where there are fewer."""
    seconds = [filled(torch.inf, count)]
    for table in tables:
        if table.virtual_stages == 1:
            cost = evaluate_batch(table, even_uniform_plans(table))
            seconds.append(cost.fitting_seconds)
    return float(torch.cat(seconds).sort().values[count - 1])


@dataclass(frozen=True)
class _QuickBounds:
    """Bounds of an outer choice's configurations by stages of equal seconds."""

    choices: Index
    """Legal strategies, `(B,)`."""
    seconds: Array
    """Bounds that know neither boundaries nor memory, `(B,)`."""


def _quick_bounds(table: CostTable) -> Iterator[tuple[int, _QuickBounds]]:
    """Yield quick bounds of a table by outer choice."""
    legal = table.allowed & table.runnable.all(0)
    outer, choice = torch.nonzero(legal, as_tuple=True)

    def chosen(values: Tensor) -> Tensor:
        return values.detach()[outer, :, choice]

    seconds = chosen(table.time.amin(1))
    sync = chosen(table.sync.amin(1))
    per_iteration = chosen(table.per_iteration)
    count = table.num_micro_batches[outer]
    bounds = spread_bounds(seconds, sync, per_iteration, count, table.pp)
    for own in torch.unique(outer).tolist():
        mine = outer == own
        choices = choice[mine].numpy()
        yield own, _QuickBounds(choices, bounds[mine].numpy())


def uniform_bounds(
    table: CostTable,
    outer: int,
    choices: Index,
    check: Check,
) -> Array:
    """Lower bounds on the iteration time of uniform configurations over all splits.

    Args:
        choices: Strategy of every configuration, `(B,)`.
        check: Called often; raises `DeadlineError` when the time is over.

    Returns:
        Seconds, `(B,)`; infinite where no split fits the memory.
    """
    costs = OuterCosts.whole(table, outer)
    segments = StageSegments.legal(costs.pp, costs.fused_to_previous)
    # the working bytes of every pair of layers are kept next to the segments
    size = max(MAX_ELEMENTS // max(len(segments), costs.num_layers**2), 1)
    result = np.full(len(choices), np.inf)
    for begin in range(0, len(choices), size):
        check()
        batch = slice(begin, begin + size)
        result[batch] = _split_bounds(costs, choices[batch])
    return result * (1 - BOUND_TOLERANCE)


def stages_hold(costs: OuterCosts, choices: Index) -> Bools:
    """Return whether all layers have room where each stage takes as many as it holds, `(B,)`."""
    static = costs.static[:, choices].T
    activation = costs.activation[:, choices].T
    working = costs.working[:, choices].T
    end = np.zeros(len(choices), dtype=int)
    layers = np.arange(costs.num_layers)
    for capacity, in_flight in zip(costs.capacity, costs.in_flight, strict=True):
        taken = layers < end[:, None]
        kept = np.where(taken, 0.0, kept_bytes(static, activation, in_flight))
        largest = np.where(taken, 0.0, working)
        peak = kept.cumsum(1) + np.maximum.accumulate(largest, 1)
        end = (peak <= capacity * (1 + SOLVER_MEMORY_TOLERANCE)).sum(1)
    return np.asarray(end == costs.num_layers)


def _split_bounds(costs: OuterCosts, choices: Index) -> Array:
    """Bound sum, bottleneck and synchronisation of splits apart, or the two maxima of one stage together."""
    every_layer = np.repeat(choices[:, None], costs.num_layers, axis=1)
    stages = ChosenStages(costs, every_layer)
    each = _stage_terms(stages)
    before = stages.segments.before
    total = before(each[:, 0], np.add)[-1, -1]
    slowest, sync, together = before(each, np.maximum)[-1, -1]
    # infinite least sums say that nothing fits
    bottleneck = (costs.num_micro_batches - 1.0) * np.where(np.isinf(slowest), 0.0, slowest)
    maxima = np.maximum(bottleneck + sync, together)
    per_iteration = costs.per_iteration[:, choices].sum(0)
    return total + maxima + per_iteration


def _stage_terms(stages: ChosenStages) -> Array:
    """Return seconds of a micro-batch, of synchronisation, and of both in an iteration, `(N, 3, ...)`.

    They are infinite where a stage does not fit.
    """
    seconds = stages.seconds()
    sync = stages.sync()
    both = (stages.costs.num_micro_batches - 1.0) * seconds + sync
    each = np.stack([seconds, sync, both], axis=1)
    return np.where(stages.fits()[:, None], each, np.inf)
