"""One outer choice of a table, solved exactly within a cost limit: the cheapest way to line up its stages.

Labels over the stage boundaries, on top of fronts of single stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from darts_parallel.cost import (
    COST_TOLERANCE,
    INCUMBENT_TOLERANCE,
    Array,
    CostTable,
    HardPlans,
    Index,
    OuterCosts,
    PricedPlan,
    evaluate_batch,
)
from darts_parallel.exact._pareto import pareto
from darts_parallel.exact._stage_fronts import (
    Front,
    LayerStructure,
    LayerwiseFronts,
    StagewiseFronts,
    end_penalties,
)
from darts_parallel.exact.limits import SegmentBounds, UsableSegments
from darts_parallel.exact.result import Check

Segment = tuple[int, int, int]
"""Stage, first layer, end."""
FEW_LABELS = 20_000
"""Labels below which a round costs next to nothing."""
MANY_LABELS = 800_000
"""Labels from which a round is expensive."""
FIRST_MARGIN = 0.0003
"""The first limit, relative to the lower bound: the optimum is often as close, and few labels survive."""
TOTAL, SLOWEST, SYNC = range(3)
"""Columns of the values of a partial plan."""


FrontSource = LayerwiseFronts | StagewiseFronts
"""Where the fronts of stages come from: one strategy per layer, or one per stage."""


class _Partials(NamedTuple):
    """Partial plans that end at one boundary; n rows."""

    values: Array
    """Sum of stage seconds and seconds paid once, slowest stage, largest synchronisation: `(n, 3)`."""
    last: Index
    """Layout at the boundary."""
    first_layer: Index
    """First layer of the newest stage."""
    row: Index
    """Row of its front."""
    parent: Index
    """Row of the partial plans before it."""

    @staticmethod
    def empty() -> "_Partials":
        """Return the one plan without a stage."""
        none = np.zeros(1, dtype=np.int64)
        return _Partials(np.zeros((1, 3)), none, none, none, none)

    @staticmethod
    def concatenate(parts: "Sequence[_Partials]") -> "_Partials":
        """Join partial plans that end at one boundary."""
        return _Partials(*map(np.concatenate, zip(*parts, strict=True)))

    def keep(self, rows: Index) -> "_Partials":
        """Select some partial plans."""
        return _Partials._make(column[rows] for column in self)


@dataclass(frozen=True)
class Arrangement:
    """A complete plan of one outer choice."""

    cost: float
    first_layers: list[int]
    choices: list[int]
    """Strategy of every layer, as a number of the table."""


class Partition:
    """Exact search over the boundaries of one outer choice, for plans that cost at most a limit."""

    def __init__(
        self,
        uses: UsableSegments,
        source: FrontSource,
        check: Check,
    ) -> None:
        costs = uses.costs
        self.costs = costs
        self.source = source
        self._check = check
        self._rest = uses.rest
        # both sums have the same order: only their last digits differ
        self._limit = uses.limit * (1 + INCUMBENT_TOLERANCE)
        later = costs.num_micro_batches - 1.0
        self._weights = np.array([1.0, later, 1.0])
        # one plan may replace another if its sum makes up for larger maxima
        of_total = [1.0, 1.0, 1.0, 1.0]
        of_slowest = [0.0, later, 0.0, later]
        of_sync = [0.0, 0.0, 1.0, 1.0]
        self._worth = np.array([of_total, of_slowest, of_sync])
        self._boundary = end_penalties(costs)
        self.labels_made = 0
        self.fronts: dict[Segment, Front] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}
        stages = uses.stages
        columns = (stages.stage.tolist(), stages.first.tolist(), stages.end.tolist())
        for stage, first, end in zip(*columns, strict=True):
            front = source.front(stage, first, end)
            if front is not None:
                self.fronts[stage, first, end] = front
                self._ends.setdefault((stage, first), []).append(end)

    def solve(self) -> Arrangement | None:
        """Return the cheapest plan within the limit; None where there is none."""
        if not np.isfinite(self._rest.after.total[0, 0]):
            return None
        reached: list[dict[int, _Partials]] = [{0: _Partials.empty()}]
        """Partial plans that end with a stage, by the layer behind it."""
        for stage in range(self.costs.pp):
            parts: dict[int, list[_Partials]] = {}
            for first, plans in reached[-1].items():
                for end in self._ends.get((stage, first), ()):
                    joined = self._join(plans, stage, first, end)
                    parts.setdefault(end, []).append(joined)
            merged = {}
            for end, several in parts.items():
                plans = _Partials.concatenate(several)
                if len(plans.values):
                    compared = plans.values @ self._worth
                    offsets = self._boundary[end]
                    kept = pareto(compared, plans.last, offsets, paid=compared.shape[1])
                    merged[end] = plans.keep(kept)
            reached.append(merged)
        return self._trace(reached)

    def _join(
        self,
        before: _Partials,
        stage: int,
        first: int,
        end: int,
    ) -> _Partials:
        """Return every partial plan with every way to run the next stage."""
        front = self.fronts[stage, first, end]
        self._check(len(before.values) * len(front))
        shape = (len(before.values), len(front))
        seconds = np.broadcast_to(front.values[:, 0], shape)
        if stage:
            kind = self.costs.boundary_kind[stage - 1]
            boundary = self.costs.p2p[kind, first - 1]
            seconds = seconds + boundary[before.last[:, None], front.first]
        known = before.values[:, None]
        total = known[..., TOTAL] + seconds + front.values[:, 1]
        slowest = np.maximum(known[..., SLOWEST], seconds)
        sync = np.maximum(known[..., SYNC], front.values[:, 2])
        values = np.stack([total, slowest, sync], axis=-1)
        values = values.reshape(-1, 3)
        # less than what later stages give the two maxima is no advantage
        place = (stage + 1, end)
        later = self._rest.after
        floors = [-np.inf, later.slowest[place], later.sync[place]]
        np.maximum(values, floors, out=values)
        self.labels_made += len(values)
        least = values @ self._weights + self._rest.after.total[place]
        kept = np.flatnonzero(least <= self._limit)
        parent, row = np.divmod(kept, max(len(front), 1))
        first_layer = np.full(len(kept), first)
        return _Partials(values[kept], front.last[row], first_layer, row, parent)

    def _trace(self, reached: list[dict[int, _Partials]]) -> Arrangement | None:
        """Return the cheapest complete plan, read back stage by stage."""
        end = self.costs.num_layers
        final = reached[-1].get(end)
        if final is None:
            return None
        total = final.values @ self._weights
        row = int(total.argmin())
        cost = float(total[row])
        starts: list[int] = []
        choices: list[int] = []
        for stage in range(self.costs.pp - 1, -1, -1):
            plans = reached[stage + 1][end]
            first = int(plans.first_layer[row])
            front = self.fronts[stage, first, end]
            origin = int(front.origin[plans.row[row]])
            choices[:0] = self.source.strategies(stage, first, end, origin)
            starts.insert(0, first)
            row = int(plans.parent[row])
            end = first
        return Arrangement(cost, starts, choices)


@dataclass
class OuterChoiceSolver:
    """One outer choice, for the uniform space with one strategy, to be solved or excluded."""

    table: CostTable
    table_index: int
    outer: int
    bound: float
    """No plan costs less; infinite once solved or infeasible."""
    choices: Index | None = None
    """Strategies that plans may take; None: all that the outer choice allows."""
    labels: int = 0
    """Partial plans made so far."""
    segments: SegmentBounds | None = None

    @cached_property
    def costs(self) -> OuterCosts:
        """Costs, computed lazily: most outer choices are pruned by their bound."""
        return OuterCosts.read(self.table, self.outer, self.choices)

    @cached_property
    def layers(self) -> LayerStructure:
        """The structure that the fronts of a layer-wise space share under any limit."""
        return LayerStructure(self.costs)

    def attempt(self, space_kind: str, limit: float, check: Check) -> PricedPlan | None:
        """Return the best plan within `limit`; None, and a raised bound, where there is none.

        Args:
            space_kind: `stagewise` or `layerwise`; `uniform` is stagewise with one strategy in `costs`.
            limit: Seconds.
            check: Called often; raises `DeadlineError` when the time is over.
        """
        if self.bound > limit:
            return None
        if self.segments is None:
            self.segments = SegmentBounds.build(self.costs, space_kind)
        uses = UsableSegments.build(self.costs, self.segments, limit)
        source: FrontSource
        if space_kind == "layerwise":
            source = LayerwiseFronts(uses, check, self.layers)
        else:
            source = StagewiseFronts(self.costs, check)
        partition = Partition(uses, source, check)
        plan = partition.solve()
        self.labels += source.labels_made + partition.labels_made
        if plan is None:
            self.bound = float(np.nextafter(limit, np.inf))
            return None
        self.bound = np.inf
        hard = HardPlans.one(self.outer, plan.choices, plan.first_layers)
        cost = evaluate_batch(self.table, hard)
        true = float(cost.iteration_time[0])
        # the true cost must agree with the label's
        agrees = abs(true - plan.cost) <= COST_TOLERANCE * true
        if not agrees or not cost.feasible[0]:
            raise RuntimeError(
                f"the exact planner priced a plan at {plan.cost} s, but it costs {true} s"
            )
        return PricedPlan(self.table_index, hard, true)

    def solve(self, space_kind: str, limit: float, check: Check) -> PricedPlan | None:
        """Return the best plan within `limit` by rising limits, or None; arguments as of `attempt`."""
        return next(rising_plans([self], space_kind, limit, check), None)

    def most_expensive(self) -> float:
        """Return the seconds that no plan of the outer choice exceeds."""
        costs = self.costs
        layers = costs.time.max(axis=(0, 2)).sum()
        reshard = costs.reshard.max(axis=(0, 2, 3))
        p2p = costs.p2p.max(axis=(0, 2, 3))
        pairs = np.maximum(reshard, p2p).sum()
        sync = costs.sync.max(axis=(0, 2)).sum()
        per_iteration = costs.per_iteration.max(axis=1).sum()
        total = costs.num_micro_batches * (layers + pairs)
        total = total + sync + per_iteration
        # rounding: where there is one strategy only, every plan is the most expensive
        return float(total) * (1 + COST_TOLERANCE)


def rising_plans(
    solvers: Sequence[OuterChoiceSolver], space_kind: str, limit: float, check: Check
) -> Iterator[PricedPlan]:
    """Raise a limit until some outer choice has a plan; yield it, and any faster one of the others.

    In each round the outer choices of the least bounds come first. Arguments as of `attempt`.
    """
    lowest = least_open(solvers)
    margin = FIRST_MARGIN
    best = np.inf
    while least_open(solvers) <= limit:
        check()
        labels = 0
        trial = lowest * (1 + margin)
        for solver in sorted(solvers, key=lambda solver: solver.bound):
            before = solver.labels
            found = solver.attempt(space_kind, min(trial, limit), check)
            labels += solver.labels - before
            if found is not None and found.time < best:
                best = found.time
                limit = min(limit, best)
                yield found
        margin *= _growth(labels)


def least_open(solvers: Sequence[OuterChoiceSolver]) -> float:
    """Return the least bound of an outer choice that is not solved."""
    return min((solver.bound for solver in solvers), default=np.inf)


def _growth(labels: int) -> float:
    """Return the growth of the margin after a round without a plan; less after rounds of many labels.

    A round that makes few labels costs nothing. After an expensive one a careful step avoids a round above
    the optimum, where labels are many more.
    """
    if labels < FEW_LABELS:
        return 3.0
    if labels < MANY_LABELS:
        return 1.6
    return 1.25
