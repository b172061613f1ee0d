"""All changes of one run of layers to one strategy, priced by what they change.

A plan with the layers of a run on another strategy differs from the plan in one stage, and in the
message to the next one. Prefix sums over the layers give the difference for every run and strategy
at once, where pricing thousands of whole plans reads every layer of each.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import (
    PLAN_MEMORY_TOLERANCE,
    Array,
    CostTable,
    HardPlans,
    Index,
    OuterCosts,
    kept_bytes,
    table_reading,
)


@dataclass(frozen=True)
class RunMoves:
    """N runs inside a stage of one plan, and the seconds with each of C strategies on them."""

    plan: HardPlans
    runs: Index
    """First layer and the one after the last of every run, `(N, 2)`."""
    seconds: Array
    """Seconds per iteration, infinite where the plan does not fit, `(N, C)`."""

    @staticmethod
    def price(table: CostTable, plan: HardPlans, runs: Index) -> "RunMoves":
        """Price all changes of runs inside stages, `(N, 2)`; one stage a device, closed form."""
        return RunMoves(plan, runs, _Changes(table, plan, runs).seconds())

    def best(self) -> tuple[HardPlans, float]:
        """Return the fastest changed plan and its seconds; infinite where none fits."""
        strategies = self.seconds.shape[1]
        row, choice = divmod(int(self.seconds.argmin()), strategies)
        first, end = self.runs[row]
        choices = self.plan.choices.clone()
        choices[0, first:end] = choice
        return replace(self.plan, choices=choices), float(self.seconds[row, choice])


class _Changes:
    """Price the stages of a plan with every strategy on every run.

    Attributes:
        first, last: First and last layer of every run, `(N,)`.
        chosen: Strategy of every layer, `(L,)`.
        stages: Stage of every layer, `(L,)`.
        stage: Stage of every run, `(N,)`.
        begins, ends: First layer of this stage, and the one after its last, `(N,)`.
        kinds: Kind of every layer's stage, `(L,)`.
    """

    def __init__(self, table: CostTable, plan: HardPlans, runs: Index) -> None:
        self.table = table
        self.outer = int(plan.outer[0])
        self.costs = OuterCosts.whole(table, self.outer)
        self.reading = table_reading(table, plan)
        self.layers = np.arange(table.num_layers)
        self.first = runs[:, 0]
        self.last = runs[:, 1] - 1
        self.chosen: Index = plan.choices[0].numpy()
        self.stages: Index = plan.stages()[0].numpy()
        self.stage = self.stages[self.first]
        starts = plan.first_layers[0].numpy()
        self.begins = starts[self.stage]
        ends = np.append(starts[1:], table.num_layers)
        self.ends = ends[self.stage]
        self.kinds = self.costs.stage_kind[self.stages]

    def _added(self, values: Array) -> Array:
        """Return what the runs add to a sum over layers, `(N, C)`, for values `(L, C)`."""
        now = values[self.layers, self.chosen]
        more = values - now[:, None]
        return self._run_sums(more, self.last + 1)

    def _run_sums(self, values: Array, end: Index) -> Array:
        """Return sums of rows from a run's first layer up to `end`, `(N, C)`."""
        none = np.zeros((1, values.shape[1]))
        sums = np.concatenate([none, values.cumsum(0)])
        return np.asarray(sums[end] - sums[self.first])

    def seconds(self) -> Array:
        """Return seconds per iteration of every run and strategy, `(N, C)`."""
        costs = self.costs
        before = self.reading.stage_seconds[0].numpy()
        own = self._stage_seconds()
        following = self._following_seconds()
        more = own - before[self.stage][:, None]
        total = before.sum() + more + following
        rest = costs.num_micro_batches - 1.0
        total = total + rest * self._slowest(own, following)
        total = total + self._slowest_sync()
        once = float(self.reading.per_iteration[0])
        total = total + once
        total = total + self._added(costs.per_iteration)
        return np.where(self._fits(), total, np.inf)

    def _slowest(self, own: Array, following: Array) -> Array:
        """Return the slowest stage's seconds, `(N, C)`.

        Args:
            own: Seconds of the run's stage.
            following: What the run adds to the next stage.
        """
        before = self.reading.stage_seconds[0].numpy()
        others = _largest_but(before, self.stage, 2)
        slowest = np.maximum(others[:, None], own)
        has_next = self.stage + 1 < self.table.pp
        next_stage = np.minimum(self.stage + 1, self.table.pp - 1)
        after = before[next_stage][:, None] + following
        after = np.where(has_next[:, None], after, 0.0)
        return np.maximum(slowest, after)

    def _slowest_sync(self) -> Array:
        """Return the seconds of the slowest device's synchronisation, `(N, C)`."""
        sync = self.reading.sync[0].numpy()
        changed = self._added(self.costs.sync[self.kinds, self.layers])
        own = sync[self.stage][:, None] + changed
        others = _largest_but(sync, self.stage, 1)
        return np.maximum(others[:, None], own)

    def _stage_seconds(self) -> Array:
        """Return seconds of the run's stage, `(N, C)`."""
        costs = self.costs
        layout = costs.layout[self.chosen]
        before = self.reading.stage_seconds[0].numpy()
        own = before[self.stage][:, None]
        own = own + self._added(costs.time[self.kinds, self.layers])
        if self.table.num_layers == 1:
            return own
        pairs = self.layers[:-1]
        reshard = costs.reshard[self.kinds[1:], pairs]  # (L - 1, Y, Y)
        # pairs inside the run: all of its layers have one layout
        now = reshard[pairs, layout[:-1], layout[1:]]
        inside = reshard[:, costs.layout, costs.layout] - now[:, None]
        own = own + self._run_sums(inside, self.last)
        rows = np.flatnonzero(self.first > self.begins)
        pair = self.first[rows] - 1
        own[rows] += _entering(reshard, pair, layout, costs.layout)
        rows = np.flatnonzero(self.last + 1 < self.ends)
        pair = self.last[rows]
        own[rows] += _leaving(reshard, pair, layout, costs.layout)
        if self.table.pp > 1 and self.table.pipeline.blocking:
            at_start = self.first == self.begins
            rows = np.flatnonzero(at_start & (self.first > 0))
            pair = self.first[rows] - 1
            own[rows] += _entering(self._messages(), pair, layout, costs.layout)
        return own

    def _following_seconds(self) -> Array:
        """Return what the run adds to the next stage by the message to it, `(N, C)`."""
        costs = self.costs
        shape = (len(self.first), len(costs.layout))
        following = np.zeros(shape)
        if self.table.pp > 1 and self.table.pipeline.blocking:
            at_end = self.last + 1 == self.ends
            inner = self.ends < self.table.num_layers
            rows = np.flatnonzero(at_end & inner)
            layout = costs.layout[self.chosen]
            pair = self.last[rows]
            following[rows] += _leaving(self._messages(), pair, layout, costs.layout)
        return following

    def _messages(self) -> Array:
        """Return seconds of a message between the layers of every pair, `(L - 1, Y, Y)`.

        Read only where a stage boundary lies between the two layers.
        """
        number = (self.stages[1:] - 1).clip(min=0)
        boundary = self.costs.boundary_kind[number]
        messages: Array = self.costs.p2p[boundary, self.layers[:-1]]
        return messages

    def _fits(self) -> NDArray[np.bool_]:
        """Return whether the changed stage fits its device and can run the strategy, `(N, C)`."""
        table = self.table
        costs = self.costs
        in_flight = costs.in_flight[self.stages][:, None]
        kept = kept_bytes(costs.static, costs.activation, in_flight)
        chosen = kept[self.layers, self.chosen]
        now = np.bincount(self.stages, chosen, minlength=table.pp)
        memory = now[self.stage][:, None] + self._added(kept)
        memory = memory + self._largest_working()
        capacity = costs.capacity[self.stage][:, None]
        fits = memory <= capacity * (1 + PLAN_MEMORY_TOLERANCE)
        fits &= table.allowed[self.outer].numpy()
        fits &= costs.kind_allowed[costs.stage_kind[self.stage]]
        # a plan that breaks a limit elsewhere stays broken there
        limit = table.capacity * (1 + PLAN_MEMORY_TOLERANCE)
        over = (self.reading.memory[0] > limit).numpy()
        broken = _any_but(over, self.stage)
        return np.asarray(fits & ~broken[:, None])

    def _largest_working(self) -> Array:
        """Return the largest working bytes of the run's stage, `(N, C)`."""
        working = self.costs.working
        run = _range_max(working, self.first, self.last + 1)
        now = working[self.layers, self.chosen][:, None]
        before = _range_max(now, self.begins, self.first)
        behind = _range_max(now, self.last + 1, self.ends)
        others = np.maximum(before, behind)
        return np.maximum(run, others)


def _entering(seconds: Array, pair: Index, layout: Index, every: Index) -> Array:
    """Return seconds `(N, C)` that another layout after `pair` adds.

    Args:
        seconds: Between the layers of all pairs, `(L - 1, Y, Y)`.
        pair: Pair of every run, by its earlier layer, `(N,)`.
        layout: Layout of every layer, `(L,)`.
        every: Layout of every strategy, `(C,)`.
    """
    now = seconds[pair, layout[pair], layout[pair + 1]]
    changed = seconds[pair[:, None], layout[pair][:, None], every]
    return np.asarray(changed - now[:, None])


def _leaving(seconds: Array, pair: Index, layout: Index, every: Index) -> Array:
    """Return seconds `(N, C)` that another layout before `pair` adds; arguments as in `_entering`."""
    after = layout[pair + 1]
    now = seconds[pair, layout[pair], after]
    changed = seconds[pair[:, None], every, after[:, None]]
    return np.asarray(changed - now[:, None])


def _largest_but(values: Array, place: Index, count: int) -> Array:
    """Return the largest of `values` but the `count` from each `place` on, `(N,)`; 0 without any."""
    so_far = np.maximum.accumulate(values)
    from_here = np.maximum.accumulate(values[::-1])[::-1]
    before = np.concatenate([[0.0], so_far])
    after = np.concatenate([from_here, np.zeros(count)])
    largest = np.maximum(before[place], after[place + count])
    return np.asarray(largest)


def _any_but(values: NDArray[np.bool_], place: Index) -> NDArray[np.bool_]:
    """Return whether any of `values` but the one at each `place` is true, `(N,)`."""
    return np.asarray(values.sum() - values[place] > 0)


def _range_max(values: Array, first: Index, end: Index) -> Array:
    """Return the largest of `values` `(L, C)` in every range, `(N, C)`; 0 in an empty one.

    A sparse table: level i holds the largest of every 2^i rows.
    """
    levels = [values]
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        last = levels[-1]
        levels.append(np.maximum(last[:-half], last[half:]))
    shape = (len(first), values.shape[1])
    result = np.zeros(shape)
    size = end - first
    for level, largest in enumerate(levels):
        width = 2**level
        rows = np.flatnonzero((size >= width) & (size < 2 * width))
        at_end = largest[end[rows] - width]
        result[rows] = np.maximum(largest[first[rows]], at_end)
    return result
