"""Limits on partial stages: what a label of a segment trie may still cost to become part of a useful plan.

A limit takes the loosest of the uses that a partial stage can still reach; what the missing layers need at
least is subtracted, with memory priced as in the lower bound.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from darts_parallel.cost import (
    GAIN_TOLERANCE,
    Array,
    Bools,
    Index,
    OuterCosts,
    kept_bytes,
    prefix_sums,
    segment_max,
)
from darts_parallel.exact._pareto import price_grid
from darts_parallel.exact.limits import Budgets
from darts_parallel.exact.segments import NodeGroups

MAX_PRICES = 10
"""Prices of memory of each budget; more forms take longer than the labels that they exclude."""


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
    total: Array | None
    """Seconds per iteration by second of the first three columns, where there is one stage only."""

    def admit(self, values: Array, node: int) -> Bools:
        """Return which labels, `(n, 5)`, may still become part of a plan within the limit."""
        needed = self.weights @ values.T  # long rows, which numpy reduces ten times as fast
        return np.asarray((needed <= self.limits[node, :, None]).all(axis=0))

    def compared(self, values: Array) -> Array:
        """Return labels `(n, 5)` for dominance: times, then bytes."""
        return np.concatenate([self.times(values), values[:, 3:]], axis=1)

    def times(self, values: Array) -> Array:
        """Return `(n, 1 to 3)` values that must not be larger for one stage to replace another.

        The seconds for the bottleneck. Their sum with those paid once, and with the synchronisation:
        more of it in one stage adds at most as much to the total. Without a pipeline, the total.
        """
        seconds, per_iteration, sync = values[:, :3].T
        if self.total is not None:
            return values[:, :3] @ self.total[:, None]
        paid = seconds + per_iteration
        if not per_iteration.any():
            return np.stack([seconds, seconds + sync], axis=1)
        return np.stack([seconds, paid, paid + sync], axis=1)


def _loosest_budgets(uses: Budgets, low: int) -> Array:
    """Return the loosest budgets of segments, and a budget of 0 behind them, `(parts, I, J)`.

    The entry (a, b) is the segment [low + a, low + b); minus infinity where there is no use.
    """
    rows = int(uses.first.max()) - low + 1
    columns = int(uses.end.max()) - low + 1
    cells = (uses.first - low, uses.end - low)
    loosest = np.full((len(uses.seconds) + 1, rows, columns), -np.inf)
    for part, seconds in zip(loosest, uses.seconds, strict=False):
        np.maximum.at(part, cells, seconds)
    loosest[-1][cells] = 0.0
    return loosest


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
    total: Array | None
    """As in `LabelLimits`."""

    @staticmethod
    def build(costs: OuterCosts, signature: tuple[int, float, float]) -> "LabelForms":
        """Return forms of a kind of stage, its micro-batches in flight and its bytes."""
        kind, in_flight, capacity = signature
        memory = kept_bytes(costs.static, costs.activation, np.asarray(in_flight))
        forms = _forms(costs, kind, memory, capacity)
        weights, part, added, needed = map(np.array, zip(*forms, strict=True))
        total = None
        if costs.pp == 1:
            total = np.array([costs.num_micro_batches, 1.0, 1.0])
        working = segment_max(costs.working.min(axis=1))
        return LabelForms(weights, part, added, prefix_sums(needed), working, total)

    def limits(self, uses: Budgets, groups: NodeGroups) -> LabelLimits | None:
        """Return limits of every node: the loosest over the segments that share it.

        Args:
            uses: Stages of the signature with their budgets.
            groups: Segments by node.

        Returns:
            None where there is no use.
        """
        if not len(uses.first):
            return None
        low = int(uses.first.min())
        budgets = _loosest_budgets(uses, low)
        rows, columns = budgets.shape[1:]
        ends = slice(low, low + columns)
        limit = budgets[self.part] + self.added[:, None, None]
        limit[KEPT_FORM] -= self.working[low : low + rows, ends]
        needed = self.needed[:, None, ends]
        # of each segment, the loosest one that begins with it
        backwards = (limit - needed)[..., ::-1]
        loosest = np.maximum.accumulate(backwards, axis=-1)[..., ::-1]
        # prefix sums round; a label that meets its budget exactly must stay
        finite = np.where(np.isfinite(limit), limit, 0.0)
        largest = np.abs(finite).max(axis=(1, 2))
        slack = GAIN_TOLERANCE * largest
        loosest = loosest + needed + slack[:, None, None]
        begins = groups.begins - low
        stops = groups.stops - low
        inside = (begins >= 0) & (begins < rows)
        inside &= stops < columns
        values = loosest[:, begins[inside], stops[inside]].T
        values = np.ascontiguousarray(values)
        of_node = groups.largest_of(inside, values, -np.inf)
        wanted = np.asarray(np.isfinite(of_node).all(axis=1))
        final = np.zeros(len(of_node), dtype=bool)
        final[groups.node[uses.first, uses.end]] = True
        return LabelLimits(self.weights, of_node, wanted, final, self.total)


class _Form(NamedTuple):
    """One linear form over the columns of a label."""

    weights: tuple[float, ...]
    """Weights of the five columns."""
    part: int
    """Budget of its limit."""
    added: float
    """Addition to the budget."""
    needed: Array
    """Smallest value of the form in every layer, `(L,)`."""


def _forms(
    costs: OuterCosts,
    kind: int,
    memory: Array,
    capacity: float,
) -> list[_Form]:
    """Return the forms of stages of a kind whose layers keep `memory` bytes, `(L, C)`."""
    count = float(costs.num_micro_batches)
    members = np.unique(costs.layer_class, return_index=True)[1]
    # as `UsableSegments.budgets`: weights of seconds, seconds paid once, and synchronisation
    parts = ((1.0, 0.0, 0.0), (count, 1.0, 1.0), (1.0, 1.0, 1.0))
    forms = []
    for part, (seconds, once, sync) in enumerate(parts):
        value = seconds * costs.time[kind]
        value = value + once * costs.per_iteration
        value = value + sync * costs.sync[kind]
        prices = price_grid(value[members], memory[members], MAX_PRICES)
        for price in prices.tolist():
            needed = (value + price * memory).min(axis=1)
            # the working bytes so far are part of the final ones
            weights = (seconds, once, sync, price, price)
            forms.append(_Form(weights, part, price * capacity, needed))
    needed = memory.min(axis=1)
    for working in (0.0, 1.0):
        weights = (0.0, 0.0, 0.0, 1.0, working)
        forms.append(_Form(weights, len(parts), capacity, needed))
    return forms


KEPT_FORM = -2
"""The form of the bytes that add up; the last one counts the working bytes, too."""
