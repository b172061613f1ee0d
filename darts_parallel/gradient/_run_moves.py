"""All changes of one run of layers to one strategy, priced by what they change.

A plan with the layers of a run on another strategy differs from the plan in one stage, and in the way into
the next one. Prefix sums over the layers give the difference for every run and strategy at once, where
pricing thousands of whole plans reads every layer of each.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    CostTable,
    HardPlans,
    OuterCosts,
    table_reading,
)

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class RunMoves:
    """Hold N runs inside a stage of one plan, and the seconds with each of C strategies on them."""

    plan: HardPlans
    runs: Index
    """First layer and the one after the last of every run, `(N, 2)`."""
    seconds: Array
    """Seconds per iteration, infinite where the plan does not fit, `(N, C)`."""

    @staticmethod
    def price(table: CostTable, plan: HardPlans, runs: Index) -> "RunMoves":
        """Price all changes of runs inside stages, `(N, 2)`, of a plan without chunks by the closed form."""
        return RunMoves(plan, runs, _Changes(table, plan, runs).seconds())

    def best(self) -> tuple[HardPlans, float]:
        """Return the fastest changed plan and its seconds; infinite where none fits."""
        row, choice = divmod(int(self.seconds.argmin()), self.seconds.shape[1])
        first, end = self.runs[row]
        choices = self.plan.choices.clone()
        choices[0, first:end] = choice
        return replace(self.plan, choices=choices), float(self.seconds[row, choice])


class _Changes:
    """Price the stages of a plan with every strategy on every run."""

    def __init__(self, table: CostTable, plan: HardPlans, runs: Index) -> None:
        self.table, self.outer = table, int(plan.outer[0])
        self.costs = OuterCosts.whole(table, self.outer)
        self.first, self.last = runs[:, 0], runs[:, 1] - 1
        self.chosen, self.layers = plan.choices[0].numpy(), np.arange(table.num_layers)
        stages = plan.stages()[0].numpy()
        self.stages, self.stage = stages, stages[self.first]
        starts = plan.first_layers[0].numpy()
        self.begins = starts[self.stage]
        self.ends = np.append(starts[1:], table.num_layers)[self.stage]
        self.reading = table_reading(table, plan)
        self.kind_of = self.costs.stage_kind[stages]

    def _added(self, values: Array) -> Array:
        """Return what the runs add to a sum over layers, `(N, C)`, for values `(L, C)`."""
        more = values - values[self.layers, self.chosen][:, None]
        sums = np.concatenate([np.zeros((1, more.shape[1])), more.cumsum(0)])
        return np.asarray(sums[self.last + 1] - sums[self.first])

    def seconds(self) -> Array:
        """Return seconds per iteration of every run and strategy, `(N, C)`."""
        table, costs = self.table, self.costs
        own, following = self._stage_seconds()
        sync = self.reading.sync[0].numpy()
        stage_sync = sync[self.stage][:, None] + self._added(costs.sync[self.kind_of, self.layers])
        before = self.reading.stage_seconds[0].numpy()
        slowest = np.maximum(_largest_but(before, self.stage, 2)[:, None], own)
        following_stage = np.minimum(self.stage + 1, table.pp - 1)
        old_following = np.where(self.stage + 1 < table.pp, before[following_stage], 0.0)[:, None]
        after = old_following + following
        slowest = np.maximum(slowest, np.where(self.stage[:, None] + 1 < table.pp, after, 0.0))
        total = before.sum() + (own - before[self.stage][:, None]) + following
        total = total + (costs.num_micro_batches - 1.0) * slowest
        total = total + np.maximum(_largest_but(sync, self.stage, 1)[:, None], stage_sync)
        total = total + float(self.reading.per_iteration[0])
        total = total + self._added(costs.per_iteration)
        return np.where(self._fits(), total, np.inf)

    def _stage_seconds(self) -> tuple[Array, Array]:
        """Return seconds of the run's stage, and what the next stage's entry adds, both `(N, C)`."""
        table, costs = self.table, self.costs
        own = self.reading.stage_seconds[0].numpy()[self.stage][:, None]
        own = own + self._added(costs.time[self.kind_of, self.layers])
        following = np.zeros_like(own)
        if table.num_layers == 1:
            return own, following
        held, every = costs.layout[self.chosen], costs.layout
        pair = self.layers[1:] - 1
        reshard = costs.reshard[self.kind_of[1:], pair]  # (L - 1, Y, Y)
        # pairs inside the run: all of its layers hold one layout
        inside = reshard[:, every, every] - reshard[pair, held[:-1], held[1:]][:, None]
        sums = np.concatenate([np.zeros((1, len(every))), inside.cumsum(0)])
        own = own + sums[self.last] - sums[self.first]
        before, after = self.first - 1, self.last  # pairs that enter and leave the run
        same = np.flatnonzero(self.first > self.begins)
        own[same] += _entering(reshard, before[same], held, every)
        same = np.flatnonzero(self.last + 1 < self.ends)
        own[same] += _leaving(reshard, after[same], held, every)
        if table.pp > 1 and table.pipeline.blocking:
            border = costs.boundary_kind[(self.stages[1:] - 1).clip(min=0)]
            p2p = costs.p2p[border, pair]
            cut = np.flatnonzero((self.first == self.begins) & (self.first > 0))
            own[cut] += _entering(p2p, before[cut], held, every)
            cut = np.flatnonzero((self.last + 1 == self.ends) & (self.ends < table.num_layers))
            following[cut] += _leaving(p2p, after[cut], held, every)
        return own, following

    def _fits(self) -> NDArray[np.bool_]:
        """Return whether the changed stage fits its device and can run the strategy, `(N, C)`."""
        table, costs = self.table, self.costs
        kept = costs.static + costs.in_flight[self.stages][:, None] * costs.activation
        held = np.bincount(self.stages, kept[self.layers, self.chosen], minlength=table.pp)
        working = costs.working
        largest = _range_max(working, self.first, self.last + 1)
        now = working[self.layers, self.chosen][:, None]
        before, behind = (
            _range_max(now, self.begins, self.first),
            _range_max(now, self.last + 1, self.ends),
        )
        others = np.maximum(before, behind)
        memory = held[self.stage][:, None] + self._added(kept) + np.maximum(largest, others)
        fits = memory <= costs.capacity[self.stage][:, None] * (1 + PLAN_MEMORY_TOLERANCE)
        fits &= table.allowed[self.outer].numpy() & costs.kind_allowed[costs.stage_kind[self.stage]]
        # a plan that breaks a limit elsewhere stays broken there
        over = (self.reading.memory[0] > table.capacity * (1 + PLAN_MEMORY_TOLERANCE)).numpy()
        return np.asarray(fits & ~_any_but(over, self.stage)[:, None])


def _entering(seconds: Array, pair: Index, held: Index, every: Index) -> Array:
    """Return seconds `(N, C)` that another layout after `pair` adds to those of all pairs `(L - 1, Y, Y)`."""
    entered = seconds[pair[:, None], held[pair][:, None], every]
    return np.asarray(entered - seconds[pair, held[pair], held[pair + 1]][:, None])


def _leaving(seconds: Array, pair: Index, held: Index, every: Index) -> Array:
    """Return seconds `(N, C)` that another layout before `pair` adds."""
    after = held[pair + 1]
    left, reached = seconds[pair, held[pair], after], seconds[pair[:, None], every, after[:, None]]
    return np.asarray(reached - left[:, None])


def _largest_but(values: Array, place: Index, count: int) -> Array:
    """Return the largest of `values` but the `count` from each `place` on, `(N,)`; 0 where none is left."""
    before = np.concatenate([[0.0], np.maximum.accumulate(values)])
    after = np.concatenate([np.maximum.accumulate(values[::-1])[::-1], np.zeros(count)])
    return np.asarray(np.maximum(before[place], after[place + count]))


def _any_but(values: NDArray[np.bool_], place: Index) -> NDArray[np.bool_]:
    """Return whether any of `values` but the one at each `place` is true, `(N,)`."""
    return np.asarray(values.sum() - values[place] > 0)


def _range_max(values: Array, first: Index, end: Index) -> Array:
    """Return the largest of `values` `(L, C)` in every range, `(N, C)`; 0 in an empty one (sparse table)."""
    levels = [values]
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
    result = np.zeros((len(first), values.shape[1]))
    size = end - first
    for level, largest in enumerate(levels):
        mine = np.flatnonzero((size >= 2**level) & (size < 2 ** (level + 1)))
        result[mine] = np.maximum(largest[first[mine]], largest[end[mine] - 2**level])
    return result
