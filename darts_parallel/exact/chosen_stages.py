"""Stages of layers whose strategies are chosen: what every segment costs, and balanced splits of them.

The one place that adds up the layers of a stage: for the fronts of stages with one strategy each, for new
edges of a known plan, for the rivals that split one strategy. Balanced chunks are the linear partition
problem that PipeDream (Narayanan et al. 2019, SOSP, section 3.1) and DAPPLE solve for stages, asked of the
chunks of any schedule: it balances chunks, and does not see how the schedule waits.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import (
    SOLVER_MEMORY_TOLERANCE,
    Array,
    CostTable,
    HardPlans,
    Index,
    OuterCosts,
    SegmentSums,
    evaluate_batch,
    even_uniform_plans,
    prefix_sums,
)
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.segments import StageSegments


class ChosenStages:
    """Every possible stage of an outer choice whose layers have given strategies.

    Answers are arrays `(N,)`; `(N, X)` for X ways to run the layers.
    """

    def __init__(self, costs: OuterCosts, choices: Index) -> None:
        """Add up.

        Args:
            choices: Strategy of every layer, `(L,)` or `(X, L)`.
        """
        self.costs, self.choices = costs, choices
        self.segments = StageSegments.legal(costs.pp, costs.fused_to_previous)
        self._sums = SegmentSums(costs, np.atleast_2d(choices))
        self._places = (self.segments.stage, self.segments.first, self.segments.end)

    @staticmethod
    def of(table: CostTable, plan: HardPlans) -> "ChosenStages":
        """Return the stages of one plan's strategies; its own edges do not matter."""
        return ChosenStages(OuterCosts.whole(table, int(plan.outer[0])), plan.choices[0].numpy())

    @staticmethod
    def uniform(costs: OuterCosts, choice: int) -> "ChosenStages":
        """Return the stages of layers that share one strategy."""
        return ChosenStages(costs, np.full(costs.num_layers, choice))

    def seconds(self) -> Array:
        """Return seconds of a micro-batch with the boundary before it; infinite where its kind cannot run."""
        costs, segments, layout = self.costs, self.segments, self.costs.layout[self.choices]
        across = costs.p2p[:, np.arange(costs.num_layers - 1), layout[..., :-1], layout[..., 1:]]
        result = self._shaped(self._sums.seconds(*self._places))
        result = result + segments.entering(np.moveaxis(across, -1, 1), costs.boundary_kind)
        refused = ~costs.kind_allowed[:, self.choices]
        if not refused.any():
            return result
        held = np.moveaxis(prefix_sums(refused.astype(float)), -1, 1)
        kind = costs.stage_kind[segments.stage]
        return np.where(held[kind, segments.end] > held[kind, segments.first], np.inf, result)

    def sync(self) -> Array:
        """Return the seconds of gradient synchronisation and optimizer."""
        return self._shaped(self._sums.sync(*self._places))

    def fits(self) -> NDArray[np.bool_]:
        """Return whether the stage's memory suffices."""
        costs, segments = self.costs, self.segments
        peak = self._shaped(self._sums.peak_bytes(*self._places))
        # rounding of prefix sums must not exclude what fits to the byte
        room = costs.capacity[segments.stage] * (1 + SOLVER_MEMORY_TOLERANCE)
        return np.asarray((room >= peak.T).T)

    def _shaped(self, values: Array) -> Array:
        """Return sums `(X, N)` in the shape of answers."""
        return values.T.reshape(len(self.segments), *self.choices.shape[:-1])

    def fitting(self) -> tuple[StageSegments, Array]:
        """Return segments that fit their stage and run there, and the seconds of each."""
        seconds = self.seconds()
        kept = self.fits() & np.isfinite(seconds)
        return self.segments.keep(kept), seconds[kept]


def balanced(table: CostTable, outer: int, choice: int) -> HardPlans:
    """Return one plan whose longest chunk is as short as it can be."""
    segments = StageSegments.legal(table.num_stages, table.fused_to_previous.numpy())
    layers = table.time[outer, :, :, choice].detach().numpy()
    seconds = segments.sums(layers, table.stage_kind.numpy())
    _, starts = segments.split_below(seconds, segments.least_maximum(seconds))
    choices = torch.full((1, table.num_layers), choice)
    return HardPlans(torch.tensor([outer]), choices, torch.tensor([starts]))


def balanced_plans(table: CostTable, outers: Iterable[int], count: int = 2) -> HardPlans | None:
    """Return balanced plans of the strategies that do best on even chunks.

    Args:
        outers: Outer choices that count.
        count: Strategies of each outer choice: the fastest that fit; where none does, the fastest, whose
            plan may be repaired, and the lightest.

    Returns:
        At most `count` plans for each outer choice; None without any.
    """
    even, found = even_uniform_plans(table), []
    cost = evaluate_batch(table, even)
    peak = (cost.memory / table.capacity).amax(1)
    # every plan that fits comes before every one that does not
    rank = torch.where(cost.feasible, cost.iteration_time / cost.iteration_time.max(), 1.0 + peak)
    for outer in outers:
        mine = torch.nonzero(even.outer == outer).squeeze(1)
        best = mine[rank[mine].argsort(stable=True)[:count]].tolist()
        if not bool(cost.feasible[mine].any()):
            best = [int(mine[cost.iteration_time[mine].argmin()]), *best[: count - 1]]
        try:
            found += [balanced(table, outer, int(even.choices[row, 0])) for row in best]
        except DeadlineError:
            found.append(even[torch.tensor(best)])
    return HardPlans.concatenate(found) if found else None
