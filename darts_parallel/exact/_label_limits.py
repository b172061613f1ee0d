"""Limits on partial stages: what a label of a segment trie may still cost to become part of a useful plan.

A limit takes the loosest of the uses that a partial stage can still reach; what the missing layers need at
least is subtracted, with memory priced as in the lower bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost import Array, Index, OuterCosts, prefix_sums, segment_max
from darts_parallel.exact._pareto import price_grid
from darts_parallel.exact.segments import NodeGroups

Bools = NDArray[np.bool_]
MOST_PRICES = 10
"""Prices of memory in each part of the forms."""


@dataclass(frozen=True)
class LabelLimits:
    """Limits on the labels of every node of a segment trie, for one stage signature."""

    weights: Array
    """Linear forms over the columns of a label, `(F, 5)`."""
    limits: Array
    """Largest useful value of each form, `(nodes, F)`."""
    wanted: Bools
    """Nodes that lead to a stage, `(nodes,)`."""
    final: Bools
    """Nodes that can be a stage, `(nodes,)`."""
    room: Array
    """Bytes below which a label fits whatever follows, `(nodes,)`."""
    total: Array | None
    """Seconds per iteration by second of the first three columns, where there is one stage only."""

    def admit(self, values: Array, node: int) -> Bools:
        """Return which labels, `(n, 5)`, may still become part of a plan within the limit."""
        return np.asarray((values @ self.weights.T <= self.limits[node]).all(axis=1))

    def relevant(self, values: Array, node: int) -> Array:
        """Return labels `(n, 5)` for dominance: times, then bytes, equal where they cannot bind."""
        memory, free = values[:, 3:].copy(), values[:, 3] <= self.room[node]
        memory[free] = (self.room[node], 0.0)
        return np.concatenate([self.times(values), memory], axis=1)

    def times(self, values: Array) -> Array:
        """Return `(n, 1 to 3)` values that must not be larger for one stage to replace another.

        The seconds for the bottleneck. Their sum with those paid once, and with the synchronisation:
        more of it in one stage adds at most as much to the total. Without a pipeline, the total.
        """
        seconds, per_iteration, sync = values[:, :3].T
        if self.total is not None:
            return values[:, :3] @ self.total[:, None]
        paid = seconds + per_iteration
        columns = [seconds, paid, paid + sync] if per_iteration.any() else [seconds, seconds + sync]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Box:
    """Uses of one stage signature: segments [i, j) from the earliest beginning to the latest end.

    Arrays end in `(I, J)`; their entry (a, b) is the segment [low + a, low + b).
    """

    low: int
    used: Bools
    """Segments that can be a stage, `(I, J)`."""
    budgets: Array
    """The loosest budgets of a segment, `(parts, I, J)`; minus infinity where there is no use."""

    @staticmethod
    def of(first: Index, end: Index, budgets: Array) -> "_Box":
        """Build limits from segments `(n,)` of several stages with their budgets `(parts, n)`."""
        low = int(first.min())
        shape = (int(first.max()) - low + 1, int(end.max()) - low + 1)
        place = (first - low) * shape[1] + end - low
        order = np.argsort(place, kind="stable")
        starts = np.flatnonzero(np.diff(place[order], prepend=-1))
        cells = place[order][starts]
        used, most = np.zeros(shape, dtype=bool), np.full((len(budgets), *shape), -np.inf)
        used.ravel()[cells] = True
        most.reshape(len(budgets), -1)[:, cells] = np.maximum.reduceat(
            budgets[:, order], starts, axis=1
        )
        return _Box(low, used, most)

    @property
    def ends(self) -> slice:
        """Return the box's ends among the boundaries 0 to L."""
        return slice(self.low, self.low + self.used.shape[1])

    def cut(self, values: Array) -> Array:
        """Return the box's part of values `(L + 1, L + 1)`."""
        return values[self.low : self.low + self.used.shape[0], self.ends]

    def inside(self, groups: NodeGroups) -> Bools:
        """Return which segments of the groups, `(S,)`, some use begins with."""
        reaching = np.logical_or.accumulate(self.used[:, ::-1], axis=1)[:, ::-1]
        first, end = groups.begins - self.low, groups.stops - self.low
        result = (first >= 0) & (first < reaching.shape[0]) & (end < reaching.shape[1])
        result[result] = reaching[first[result], end[result]]
        return np.asarray(result)


@dataclass(frozen=True)
class LabelForms:
    """Quantities that are limited on the stages of one signature, for any limit: F linear forms over labels.

    `weights . (seconds, once, sync)` with a price on bytes, one form for each useful price, for each of the
    budgets of `UsableSegments.budgets`; then the bytes of the stage without and with the working ones.
    """

    weights: Array
    """`(F, 5)`."""
    part: Index
    """Budget that a form's limit comes from, `(F,)`; the last one is 0 where there is a use."""
    added: Array
    """Addition to the budget: the capacity at the form's price, `(F,)`."""
    needed: Array
    """Prefix sums of what the layers need of a form at least, `(F, L + 1)`."""
    working: Array
    """Working bytes of segments at least, `(L + 1, L + 1)`."""
    most: Array
    """Prefix sums of the bytes that layers add up to at most, `(L + 1,)`."""
    most_working: Array
    """Working bytes of segments at most, `(L + 1, L + 1)`."""
    capacity: float
    total: Array | None
    """As in `LabelLimits`."""

    @staticmethod
    def build(
        costs: OuterCosts, signature: tuple[int, float, float], choices: Sequence[Index]
    ) -> "LabelForms":
        """Return forms of a kind of stage, its micro-batches in flight and its bytes."""
        kind, in_flight, capacity = signature
        count = float(costs.num_micro_batches)
        memory = costs.static + in_flight * costs.activation
        first = np.unique(costs.layer_class, return_index=True)[1]
        weights, parts, added, least = [], [], [], []
        for part, (seconds, once, sync) in enumerate(
            ((1.0, 0.0, 0.0), (count, 1.0, 1.0), (1.0, 1.0, 1.0))
        ):
            value = (
                seconds * costs.time[kind] + once * costs.per_iteration + sync * costs.sync[kind]
            )
            for price in price_grid(value[first], memory[first], MOST_PRICES).tolist():
                # the working bytes so far are part of the final ones
                weights.append((seconds, once, sync, price, price))
                parts.append(part)
                added.append(price * capacity)
                least.append((value + price * memory).min(axis=1))
        weights += [(0.0, 0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0, 1.0)]
        least += 2 * [memory.min(axis=1)]
        most = np.array([memory[layer, own].max() for layer, own in enumerate(choices)])
        most_working = np.array(
            [costs.working[layer, own].max() for layer, own in enumerate(choices)]
        )
        return LabelForms(
            weights=np.array(weights),
            part=np.array([*parts, 3, 3]),
            added=np.array([*added, capacity, capacity]),
            needed=prefix_sums(np.stack(least)),
            working=segment_max(costs.working.min(axis=1)),
            most=prefix_sums(most),
            most_working=segment_max(most_working),
            capacity=capacity,
            total=np.array([count, 1.0, 1.0]) if costs.pp == 1 else None,
        )

    def limits(
        self, first: Index, end: Index, budgets: Array, groups: NodeGroups
    ) -> LabelLimits | None:
        """Return limits of every node: the loosest over the segments that share it.

        Args:
            first, end, budgets: Of the uses, as `UsableSegments.budgets` names them.

        Returns:
            None where there is no use.
        """
        if not len(first):
            return None
        box = _Box.of(first, end, np.concatenate([budgets, np.zeros((1, len(first)))]))
        limit = box.budgets[self.part] + self.added[:, None, None]
        limit[-2] -= box.cut(self.working)
        needed = self.needed[:, None, box.ends]
        loosest = np.maximum.accumulate((limit - needed)[..., ::-1], axis=-1)[..., ::-1]
        # prefix sums round; a label that meets its budget exactly must stay
        slack = 1e-12 * np.abs(np.where(np.isfinite(limit), limit, 0.0)).max(axis=(1, 2))
        loosest = loosest + needed + slack[:, None, None]
        inside = box.inside(groups)
        cells = (groups.begins[inside] - box.low, groups.stops[inside] - box.low)
        own = groups.largest_of(
            inside, np.ascontiguousarray(loosest[:, cells[0], cells[1]].T), -np.inf
        )
        final = np.zeros(len(own), dtype=bool)
        final[groups.node[first, end]] = True
        room = -groups.largest_of(inside, -self._room(box)[cells], -np.inf) - 1e-12 * self.capacity
        wanted = np.asarray(np.isfinite(own).all(axis=1))
        return LabelLimits(self.weights, own, wanted, final, room, self.total)

    def _room(self, box: _Box) -> Array:
        """Return the bytes below which memory cannot bind, `(I, J)`: the missing layers at their largest."""
        most = self.most[box.ends]
        spare = np.where(box.used, self.capacity - box.cut(self.most_working) - most, np.inf)
        return np.asarray(np.minimum.accumulate(spare[:, ::-1], axis=1)[:, ::-1] + most)
