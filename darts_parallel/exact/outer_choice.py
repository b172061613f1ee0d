"""One outer choice of a table, solved exactly within a cost limit."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from darts_parallel.cost import CostTable, HardPlans, PricedPlan, evaluate_batch
from darts_parallel.exact._partition import Arrangement, Partition
from darts_parallel.exact._stage_fronts import LayerStructure, LayerwiseFronts, StagewiseFronts
from darts_parallel.exact.bounds import Index, OuterCosts
from darts_parallel.exact.limits import SegmentBounds, UsableSegments
from darts_parallel.exact.result import Check

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
            raise RuntimeError(f"the exact planner priced a plan at {plan.cost} s, but it costs {true} s")
        return PricedPlan(self.table_index, hard, true)
