"""One outer choice of a table, solved exactly within a cost limit: the cheapest way to line up its stages.

Labels over the stage boundaries, on top of fronts of single stages.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from darts_parallel.cost import (
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
TOTAL, SLOWEST, SYNC = range(3)


class FrontSource(Protocol):
    """Where the fronts of stages come from: one strategy per layer, or one per stage."""

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Return the useful ways to run layers [first, end) on `stage`; None where there is none."""
        ...

    def strategies(self, stage: int, first: int, end: int, origin: int) -> list[int]:
        """Return the strategies of those layers for one row of a front."""
        ...


@dataclass(frozen=True)
class _Partials:
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
        self, costs: OuterCosts, uses: UsableSegments, source: FrontSource, check: Check
    ) -> None:
        self.costs, self.limit, self.source, self._check = costs, uses.limit, source, check
        self.labels_made = 0
        own = uses.stages
        rows = zip(own.stage.tolist(), own.first.tolist(), own.end.tolist(), strict=True)
        found = ((key, source.front(*key)) for key in rows)
        self.fronts: dict[Segment, Front] = {
            key: front for key, front in found if front is not None
        }
        self._rest = uses.rest
        self._ends: dict[tuple[int, int], list[int]] = {}
        for stage, first, end in self.fronts:
            self._ends.setdefault((stage, first), []).append(end)
        self._boundary = end_penalties(costs)

    def _useful(self, values: Array, stage: int, end: int) -> np.ndarray:
        """Return which partial plans through `stage`, ending at layer `end`, can stay within the limit."""
        later, rest = self.costs.num_micro_batches - 1.0, self._rest.sum_after[stage + 1, end]
        return np.asarray(values @ np.array([1.0, later, 1.0]) + rest <= self.limit * (1 + 1e-14))

    def solve(self) -> Arrangement | None:
        """Return the cheapest plan within the limit; None where there is none."""
        if not np.isfinite(self._rest.sum_after[0, 0]):
            return None
        start = _Partials(np.zeros((1, 3)), *(np.zeros(1, dtype=np.int64) for _ in range(4)))
        reached: list[dict[int, _Partials]] = [{0: start}]
        for stage in range(self.costs.pp):
            parts: dict[int, list[_Partials]] = {}
            for first, before in reached[-1].items():
                for end in self._ends.get((stage, first), ()):
                    self._check()
                    parts.setdefault(end, []).append(self._join(before, stage, first, end))
            merged = {end: self._merge(list_, end) for end, list_ in parts.items()}
            reached.append(
                {end: partials for end, partials in merged.items() if partials is not None}
            )
        return self._trace(reached)

    def _join(self, before: _Partials, stage: int, first: int, end: int) -> _Partials:
        """Return every partial plan with every way to run the next stage."""
        front = self.fronts[stage, first, end]
        self._check(len(before.values) * len(front))
        seconds = np.broadcast_to(front.values[:, 0], (len(before.values), len(front)))
        if stage:
            boundary = self.costs.p2p[self.costs.boundary_kind[stage - 1], first - 1]
            seconds = seconds + boundary[before.last[:, None], front.first]
        values = np.stack(
            [
                before.values[:, None, TOTAL] + seconds + front.values[:, 1],
                np.maximum(before.values[:, None, SLOWEST], seconds),
                np.maximum(before.values[:, None, SYNC], front.values[:, 2]),
            ],
            axis=-1,
        ).reshape(-1, 3)
        # less than what later stages give the two maxima is no advantage
        at = (stage + 1, end)
        floors = [-np.inf, self._rest.slowest_after[at], self._rest.sync_after[at]]
        np.maximum(values, floors, out=values)
        self.labels_made += len(values)
        kept = np.flatnonzero(self._useful(values, stage, end))
        parent, row = np.divmod(kept, max(len(front), 1))
        return _Partials(values[kept], front.last[row], np.full(len(kept), first), row, parent)

    def _merge(self, parts: list[_Partials], end: int) -> _Partials | None:
        """Return the partial plans of one boundary that no other dominates."""
        names = ("values", "last", "first_layer", "row", "parent")
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        if not len(columns[0]):
            return None
        # one plan may replace another if its sum makes up for larger maxima
        worth = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
        worth[1] *= self.costs.num_micro_batches - 1.0
        kept = pareto(columns[0] @ worth, columns[1], self._boundary[end], paid=4)
        return _Partials(*(column[kept] for column in columns))

    def _trace(self, reached: list[dict[int, _Partials]]) -> Arrangement | None:
        """Return the cheapest complete plan, read back stage by stage."""
        end = self.costs.num_layers
        final = reached[-1].get(end)
        if final is None:
            return None
        later = self.costs.num_micro_batches - 1.0
        total = final.values @ np.array([1.0, later, 1.0])
        row = int(total.argmin())
        cost = float(total[row])
        starts: list[int] = []
        choices: list[int] = []
        for stage in range(self.costs.pp - 1, -1, -1):
            here = reached[stage + 1][end]
            first = int(here.first_layer[row])
            front = self.fronts[(stage, first, end)]
            choices[:0] = self.source.strategies(
                stage, first, end, int(front.origin[here.row[row]])
            )
            starts.insert(0, first)
            row, end = int(here.parent[row]), first
        return Arrangement(cost, starts, choices)


AGREEMENT = 1e-9
"""Relative; an incumbent is reached again, and found plans are verified, to this."""


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
    layers: LayerStructure | None = None
    """Sources of fronts of a layer-wise space, the same for any limit."""

    @cached_property
    def costs(self) -> OuterCosts:
        """Read once they are asked for: most outer choices are excluded at a look."""
        return OuterCosts.read(self.table, self.outer, self.choices)

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
        source: LayerwiseFronts | StagewiseFronts
        if space_kind == "layerwise":
            if self.layers is None:
                self.layers = LayerStructure.build(self.costs)
            source = LayerwiseFronts(self.costs, uses, check, self.layers)
        else:
            source = StagewiseFronts(self.costs, uses, check)
        partition = Partition(self.costs, uses, source, check)
        plan = partition.solve()
        self.labels += source.labels_made + partition.labels_made
        if plan is None:
            self.bound = float(np.nextafter(limit, np.inf))
            return None
        self.bound = np.inf
        return self._verified(plan)

    def most_expensive(self) -> float:
        """Return the seconds that no plan of the outer choice exceeds."""
        costs = self.costs
        layers = costs.time.max(axis=(0, 2)).sum()
        pairs = np.maximum(costs.reshard.max(axis=(0, 2, 3)), costs.p2p.max(axis=(0, 2, 3))).sum()
        paid_once = costs.sync.max(axis=(0, 2)).sum() + costs.per_iteration.max(axis=1).sum()
        # rounding: where there is one strategy only, every plan is the most expensive
        return float(costs.num_micro_batches * (layers + pairs) + paid_once) * (1 + AGREEMENT)

    def _verified(self, plan: Arrangement) -> PricedPlan:
        """Return the plan with its true cost, which must agree with the label's."""
        rows = ([self.outer], [plan.choices], [plan.first_layers])
        hard = HardPlans(*(torch.tensor(row) for row in rows))
        cost = evaluate_batch(self.table, hard)
        true = float(cost.iteration_time[0])
        if not bool(cost.feasible[0]) or abs(true - plan.cost) > AGREEMENT * true:
            raise RuntimeError(
                f"the exact planner priced a plan at {plan.cost} s, but it costs {true} s"
            )
        return PricedPlan(self.table_index, hard, true)
