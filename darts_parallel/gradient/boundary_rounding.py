"""Round one relaxed plan: stage boundaries by a local search, strategies by counts.

The nearest whole boundaries may give the slowest stage one more layer. So each boundary may also take
the other side of its relaxed position. Nothing else is chosen again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost import CostTable, HardPlans, evaluate_batch, round_edges, unit_starts
from darts_parallel.gradient.rounding import moved_boundaries, round_counts

EXCESS_PENALTY = 100.0
"""Log-seconds for memory above the capacity, relative to it: a rounding that fits nearly always wins."""
LEAST_GAIN = 1e-12
"""Gain in merit below which a move is a rounding error."""


@dataclass(frozen=True)
class Rounding:
    """A relaxed plan and its roundings.

    Attributes:
        outer: Row of the table.
        weights: Weights of every layer's strategies, `(L, C)`.
        edges: Inner stage boundaries in units, `(K - 1,)`.
    """

    table: CostTable
    outer: int
    weights: Tensor
    edges: Tensor

    def descend(self) -> tuple[HardPlans, Tensor]:
        """Return all plans that the search prices, the best first, and their merits `(B,)`."""
        units = unit_starts(self.table.fused_to_previous)
        places = round_edges(self.edges.unsqueeze(0), len(units))
        zero = self.edges.new_zeros(1)
        relaxed = torch.cat([zero, self.edges])
        low = relaxed.floor().minimum(places)
        high = relaxed.ceil().maximum(places)
        plans = self._plans(units[places])
        found = merits(self.table, plans)
        priced = [plans]
        ranked = [found]
        best = float(found[0])
        while True:
            moved = moved_boundaries(places[0], len(units))
            moved = moved[((moved >= low) & (moved <= high)).all(1)]
            if not len(moved):
                break
            plans = self._plans(units[moved])
            found = merits(self.table, plans)
            priced.append(plans)
            ranked.append(found)
            least = int(found.argmin())
            if float(found[least]) >= best - LEAST_GAIN:
                break
            best = float(found[least])
            places = moved[least : least + 1]
        every = torch.cat(ranked)
        order = every.argsort(stable=True)
        return HardPlans.concatenate(priced)[order], every[order]

    def _plans(self, first_layers: Tensor) -> HardPlans:
        """Return plans of these stages `(B, K)`; equal layers of a stage share their expected counts."""
        count = len(first_layers)
        weights = self.weights.expand(count, -1, -1)
        outer = torch.full((count,), self.outer)
        plans = HardPlans(outer, weights.argmax(-1), first_layers)
        return round_counts(weights, plans, self.table)


def merits(table: CostTable, plans: HardPlans) -> Tensor:
    """Rank hard plans: log-seconds, and a penalty of memory above the capacity, `(B,)`."""
    cost = evaluate_batch(table, plans)
    excess = (cost.memory / table.capacity - 1.0).clamp(min=0.0)
    return cost.iteration_time.log() + EXCESS_PENALTY * excess.sum(1)
