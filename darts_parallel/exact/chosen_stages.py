"""Stages of layers whose strategies are chosen: what every segment costs, and balanced splits of them.

Used for the fronts of stages with one strategy each, for new stage boundaries of a known plan, and for the
rivals that split one strategy. Balanced chunks are the linear partition problem that PipeDream (Narayanan
et al. 2019, SOSP, section 3.1) and DAPPLE solve for stages. Here it is solved for the chunks of any
schedule: it balances chunks, and does not see how the schedule waits.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import (
    SOLVER_MEMORY_TOLERANCE,
    Array,
    Bools,
    CostTable,
    HardPlans,
    Index,
    OuterCosts,
    SegmentSums,
    evaluate_batch,
    even_uniform_plans,
    flatnonzero,
    prefix_sums,
)
from darts_parallel.exact.result import DeadlineError
from darts_parallel.exact.segments import StageSegments

Value = TypeVar("Value", np.float64, np.bool_)


class ChosenStages:
    """Every possible stage of an outer choice whose layers have given strategies.

    Answers are arrays `(N,)`; `(N, X)` for X ways to run the layers.
    """

    def __init__(self, costs: OuterCosts, choices: Index) -> None:
        """Add up.

        Args:
            choices: Strategy of every layer, `(L,)` or `(X, L)`.
        """
        self.costs = costs
        self.choices = choices
        self.segments = StageSegments.legal(costs.pp, costs.fused_to_previous)
        self._sums = SegmentSums(costs, np.atleast_2d(choices))
        self._places = (self.segments.stage, self.segments.first, self.segments.end)

    @staticmethod
    def of(table: CostTable, plan: HardPlans) -> "ChosenStages":
        """Return the stages of one plan's strategies; its own stage boundaries do not matter."""
        costs = OuterCosts.whole(table, int(plan.outer[0]))
        return ChosenStages(costs, plan.choices[0].numpy())

    @staticmethod
    def uniform(costs: OuterCosts, choice: int) -> "ChosenStages":
        """Return the stages of layers that share one strategy."""
        return ChosenStages(costs, np.full(costs.num_layers, choice))

    def seconds(self) -> Array:
        """Return seconds of a micro-batch with the boundary before it; infinite where its kind cannot run."""
        costs = self.costs
        segments = self.segments
        layout = costs.layout[self.choices]
        pairs = np.arange(costs.num_layers - 1)
        across = costs.p2p[:, pairs, layout[..., :-1], layout[..., 1:]]
        result = self._shaped(self._sums.seconds(*self._places))
        p2p = np.moveaxis(across, -1, 1)
        result = result + segments.entering(p2p, costs.boundary_kind)
        refused = ~costs.kind_allowed[:, self.choices]
        if not refused.any():
            return result
        before = np.moveaxis(prefix_sums(refused.astype(float)), -1, 1)
        kind = costs.stage_kind[segments.stage]
        some_refused = before[kind, segments.end] > before[kind, segments.first]
        return np.where(some_refused, np.inf, result)

    def sync(self) -> Array:
        """Return the seconds of gradient synchronisation and optimizer."""
        return self._shaped(self._sums.sync(*self._places))

    def fits(self) -> Bools:
        """Return whether the stage's memory suffices."""
        peak = self._sums.peak_bytes(*self._places)
        # rounding of prefix sums must not exclude what fits to the byte
        room = self.costs.capacity[self.segments.stage] * (1 + SOLVER_MEMORY_TOLERANCE)
        return self._shaped(peak <= room)

    def _shaped(self, values: NDArray[Value]) -> NDArray[Value]:
        """Return sums `(X, N)` in the shape of answers."""
        shape = (len(self.segments), *self.choices.shape[:-1])
        return values.T.reshape(shape)

    def fitting(self) -> tuple[StageSegments, Array]:
        """Return segments that fit their stage and run there, and the seconds of each."""
        seconds = self.seconds()
        kept = self.fits() & np.isfinite(seconds)
        return self.segments.keep(kept), seconds[kept]


def balanced(table: CostTable, outer: int, choice: int) -> HardPlans:
    """Return one plan whose longest chunk is as short as it can be."""
    segments = StageSegments.legal(table.num_stages, table.fused_to_previous.numpy())
    layers = table.time[outer, :, :, choice].detach()
    seconds = segments.sums(layers.numpy(), table.stage_kind.numpy())
    return HardPlans.one(outer, [choice] * table.num_layers, segments.even_split(seconds))


def balanced_plans(
    table: CostTable,
    outers: Iterable[int],
    count: int = 2,
) -> HardPlans | None:
    """Return balanced plans of the strategies that do best on even chunks.

    Args:
        outers: Outer choices that count.
        count: Strategies of each outer choice: the fastest that fit; where none does, the fastest, whose
            plan may be repaired, and the lightest.

    Returns:
        At most `count` plans for each outer choice; None without any.
    """
    even = even_uniform_plans(table)
    cost = evaluate_batch(table, even)
    seconds = cost.iteration_time
    peak = (cost.memory / table.capacity).amax(1)
    # every plan that fits comes before every one that does not
    rank = torch.where(cost.feasible, seconds / seconds.max(), 1.0 + peak)
    found = []
    for outer in outers:
        mine = flatnonzero(even.outer == outer)
        order = rank[mine].argsort(stable=True)
        best = mine[order[:count]].tolist()
        if not cost.feasible[mine].any():
            fastest = int(mine[seconds[mine].argmin()])
            best = [fastest, *best[: count - 1]]
        try:
            for row in best:
                choice = int(even.choices[row, 0])
                found.append(balanced(table, outer, choice))
        except DeadlineError:  # too many layers to balance
            found.append(even[torch.tensor(best)])
    return HardPlans.concatenate(found) if found else None
