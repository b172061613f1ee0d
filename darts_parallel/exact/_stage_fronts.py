"""Pareto fronts of one pipeline stage: every useful way to run a segment of layers.

A layer-wise stage is solved by labels `(micro-batch seconds, seconds paid once, synchronisation seconds,
bytes, working bytes)` that grow layer by layer. Segments that hold equal layers share their labels: in a
trie of layer classes, inside a run of equal blocks only the length of the segment matters.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from darts_parallel.cost import (
    SOLVER_MEMORY_TOLERANCE,
    Array,
    Index,
    OuterCosts,
    SegmentSums,
    equal_rows,
    kept_bytes,
)
from darts_parallel.errors import remembered
from darts_parallel.exact._label_limits import LabelForms, LabelLimits
from darts_parallel.exact._pareto import pareto
from darts_parallel.exact.limits import Budgets, UsableSegments
from darts_parallel.exact.result import Check
from darts_parallel.exact.segments import NodeGroups

SECONDS, ONCE, SYNC, BYTES, WORKING = range(5)
"""Columns of a label."""


@dataclass(frozen=True)
class Front:
    """Ways to run a stage; none dominates another. n rows."""

    values: Array
    """Seconds of a micro-batch without the incoming boundary, paid once, and of synchronisation, `(n, 3)`."""
    first: Index
    """Layout of the first layer, `(n,)`."""
    last: Index
    origin: Index
    """Data by which `strategies` of the fronts names the strategies, `(n,)`."""

    def __len__(self) -> int:
        return len(self.values)


class Labels(NamedTuple):
    """Partial stages that end at one node of the trie; n rows."""

    values: Array
    """`(n, 5)`."""
    first: Index
    current: Index
    parent: Index
    """Row of the parent node's labels."""
    choice: Index
    """Strategy of the newest layer."""

    def keep(self, rows: Index) -> "Labels":
        """Select some labels."""
        return Labels._make(column[rows] for column in self)


@dataclass(frozen=True)
class SegmentTrie:
    """Segments [i, j) by the classes of their layers."""

    node: Index
    """Node of every segment, `(L + 1, L + 1)`; 0, the root, where i >= j."""
    parent: Index
    """Node without its last layer, `(nodes,)`; nodes are numbered from short to long."""
    example: Index
    """One segment of every node, `(nodes, 2)`."""

    @staticmethod
    def build(costs: OuterCosts) -> "SegmentTrie":
        """Number all segments."""
        size = costs.num_layers
        pairs = np.concatenate([costs.reshard, costs.p2p])
        pairs = pairs.transpose(1, 0, 2, 3)
        classes = costs.layer_class
        pair_class = equal_rows(pairs)
        node = np.zeros((size + 1, size + 1), dtype=np.int64)
        known: dict[tuple[int, int, int], int] = {}
        parent = [0]
        example = [(0, 0)]
        for length in range(1, size + 1):
            for i in range(size + 1 - length):
                j = i + length
                above = int(node[i, j - 1])
                # a single layer has no neighbour before it
                pair = int(pair_class[j - 2]) if length > 1 else -1
                last = int(classes[j - 1])
                key = (above, last, pair)
                if key not in known:
                    known[key] = len(parent)
                    parent.append(above)
                    example.append((i, j))
                node[i, j] = known[key]
        return SegmentTrie(node, np.array(parent), np.array(example))


class NodePenalties(NamedTuple):
    """Layout penalties before and inside every node, `(nodes, Y, Y)`."""

    before: Array
    inside: Array


@dataclass(frozen=True)
class LayerStructure:
    """Segments of one outer choice, whatever the limit on its seconds."""

    costs: OuterCosts

    @cached_property
    def trie(self) -> SegmentTrie:
        """Its segments by the classes of their layers."""
        return SegmentTrie.build(self.costs)

    @cached_property
    def groups(self) -> NodeGroups:
        """Its segments by node."""
        return NodeGroups.of(self.trie.node)

    @remembered
    def forms(self, signature: int) -> LabelForms:
        """Return what is limited on the stages of a signature."""
        return LabelForms.build(self.costs, self.costs.stage_signatures[0][signature])

    @remembered
    def entered(self, kind: int) -> NodePenalties:
        """Return layout penalties before and inside every node on a kind of stage."""
        costs = self.costs
        before = no_penalties(costs)
        inside = no_penalties(costs)
        if costs.num_layers > 1:
            # counted as what dominance compares: without a pipeline seconds per iteration
            weight = costs.num_micro_batches if costs.pp == 1 else 1
            reshard = costs.reshard[kind : kind + 1]
            inside[1:-1] = penalties(reshard) * weight
            if len(costs.p2p):
                entering = costs.p2p.swapaxes(-1, -2)
                before[1:-1] = penalties(entering)
        groups = self.groups
        return NodePenalties(
            groups.largest(before[groups.begins]), groups.largest(inside[groups.stops])
        )

    @cached_property
    def boundary(self) -> Array:
        """Return layout penalties at the end of a stage, `(L + 1, Y, Y)`."""
        return end_penalties(self.costs)


class LayerwiseFronts:
    """Stage fronts of one outer choice when every layer has its own strategy."""

    def __init__(
        self,
        uses: UsableSegments,
        check: Check,
        structure: LayerStructure,
    ) -> None:
        costs = structure.costs
        self.costs = costs
        self._check = check
        self.trie = structure.trie
        self.labels_made = 0
        signatures, self.of_stage = costs.stage_signatures
        self._labels: list[dict[int, Labels]] = [{} for _ in signatures]
        self._fronts: list[dict[int, Front]] = [{} for _ in signatures]
        for number, signature in enumerate(signatures):
            budgets = uses.budgets(number)
            limits = structure.forms(number).limits(budgets, structure.groups)
            if limits is not None:
                offsets = _NodeOffsets.build(structure, budgets, signature[0])
                growth = _Growth(*signature, limits, offsets)
                self._labels[number] = self._grow(growth)
                self._fronts[number] = self._finish(self._labels[number], growth)

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Return the front of layers [first, end) on `stage`; None where no way is useful."""
        signature = int(self.of_stage[stage])
        node = int(self.trie.node[first, end])
        return self._fronts[signature].get(node)

    def strategies(
        self,
        stage: int,
        first: int,
        end: int,
        origin: int,
    ) -> list[int]:
        """Return strategies, as numbers of the table, of the layers of one row of a front."""
        by_node = self._labels[self.of_stage[stage]]
        node = int(self.trie.node[first, end])
        row = origin
        result = []
        while node:
            labels = by_node[node]
            result.append(int(self.costs.choices[labels.choice[row]]))
            row = int(labels.parent[row])
            node = int(self.trie.parent[node])
        return result[::-1]

    def _grow(self, growth: "_Growth") -> dict[int, Labels]:
        """Return labels of all nodes that lead to a use."""
        result: dict[int, Labels] = {}
        limits = growth.limits
        for node in np.flatnonzero(limits.wanted).tolist():
            self._check()
            above = int(self.trie.parent[node])
            if above and above not in result:
                continue
            layer = int(self.trie.example[node, 1]) - 1
            parent = result.get(above)
            labels = self._extend(parent, layer, growth)
            self.labels_made += len(labels.values)
            self._check(len(labels.values))
            admitted = np.flatnonzero(limits.admit(labels.values, node))
            states = self._states(labels, admitted)
            compared = limits.compared(labels.values[admitted])
            offsets = growth.offsets.growing(node)
            # the bytes do not pay the penalty
            paid = compared.shape[1] - 2
            kept = admitted[pareto(compared, states, offsets, paid=paid)]
            if len(kept):
                result[node] = labels.keep(kept)
        return result

    def _states(self, labels: Labels, rows: Index) -> Index:
        """Return the layouts of the first and the newest layer of some labels, as one number."""
        layouts = self.costs.p2p.shape[-1]
        return labels.first[rows] * layouts + labels.current[rows]

    def _extend(self, labels: Labels | None, layer: int, growth: "_Growth") -> Labels:
        """Return all labels with one more layer."""
        costs = self.costs
        kind = growth.kind
        choice = np.flatnonzero(costs.kind_allowed[kind])
        static = costs.static[layer, choice]
        activation = costs.activation[layer, choice]
        memory = kept_bytes(static, activation, np.asarray(growth.in_flight))
        time = costs.time[kind, layer, choice]
        once = costs.per_iteration[layer, choice]
        sync = costs.sync[kind, layer, choice]
        largest = costs.working[layer, choice]
        added = np.stack([time, once, sync, memory, largest], axis=1)
        layout = costs.layout[choice]
        size = len(choice)
        if labels is None:
            parent = np.zeros(size, dtype=np.int64)
            return Labels(added, layout, layout, parent, choice)
        count = len(labels.values)
        values = labels.values[:, None, :] + added
        reshard = costs.reshard[kind, layer - 1]
        values[..., SECONDS] += reshard[labels.current[:, None], layout]
        working = labels.values[:, None, WORKING]
        values[..., WORKING] = np.maximum(working, added[:, WORKING])
        first = np.repeat(labels.first, size)
        parent = np.repeat(np.arange(count), size)
        current = np.tile(layout, count)
        newest = np.tile(choice, count)
        values = values.reshape(-1, WORKING + 1)
        return Labels(values, first, current, parent, newest)

    def _finish(self, labels: dict[int, Labels], growth: "_Growth") -> dict[int, Front]:
        """Return fronts of the nodes that can be a stage: memory is settled, three columns remain."""
        result = {}
        room = growth.capacity * (1 + SOLVER_MEMORY_TOLERANCE)
        for node, rows in labels.items():
            if not growth.limits.final[node]:
                continue
            peak = rows.values[:, BYTES] + rows.values[:, WORKING]
            fits = np.flatnonzero(peak <= room)
            states = self._states(rows, fits)
            compared = growth.limits.times(rows.values[fits])
            offsets = growth.offsets.finished(node)
            paid = compared.shape[1]
            kept = fits[pareto(compared, states, offsets, paid=paid)]
            if len(kept):
                values = rows.values[kept, : SYNC + 1]
                first = rows.first[kept]
                last = rows.current[kept]
                result[node] = Front(values, first, last, kept)
        return result


@dataclass(frozen=True)
class _Growth:
    """How labels grow on the stages of one signature."""

    kind: int
    in_flight: float
    capacity: float
    limits: LabelLimits
    offsets: "_NodeOffsets"


def penalties(rows: Array) -> Array:
    """Return the largest extra cost of layout b over layout a, whatever follows: `(N, Y, Y)`, at least 0.

    Args:
        rows: Seconds from a layout to its successor in several settings, shape `(S, N, Y, Y)`.
    """
    flat = np.moveaxis(rows, 0, -1)
    flat = flat.reshape(*rows.shape[1:3], -1)
    extra = flat[:, :, None] - flat[:, None]
    largest = extra.max(axis=-1)
    return largest.clip(min=0.0)


def no_penalties(costs: OuterCosts) -> Array:
    """Return penalties of 0 at every boundary of layers, `(L + 1, Y, Y)`."""
    layouts = costs.p2p.shape[-1]
    return np.zeros((costs.num_layers + 1, layouts, layouts))


def end_penalties(costs: OuterCosts) -> Array:
    """Return layout penalties at the end of a stage by the layer behind it, `(L + 1, Y, Y)`."""
    result = no_penalties(costs)
    if costs.num_layers > 1 and len(costs.p2p):
        # a worse boundary slows the next stage, which may be the slowest: m micro-batches pay
        result[1:-1] = penalties(costs.p2p) * costs.num_micro_batches
    return result


@dataclass(frozen=True)
class _NodeOffsets:
    """Layout penalties of every node, the worst of its segments; all `(nodes, Y, Y)`."""

    before: Array
    inside: Array
    after: Array

    @staticmethod
    def build(structure: LayerStructure, uses: Budgets, kind: int) -> "_NodeOffsets":
        """Build from the segments that may be a stage of this signature."""
        entered = structure.entered(kind)
        groups = structure.groups
        final = np.zeros(groups.node.shape, dtype=bool)
        final[uses.first, uses.end] = True
        chosen = final[groups.begins, groups.stops]
        boundary = structure.boundary[groups.stops[chosen]]
        after = groups.largest_of(chosen, boundary)
        return _NodeOffsets(entered.before, entered.inside, after)

    def growing(self, node: int) -> Array | None:
        """Return penalty between states (first, current) of labels that may still grow."""
        last = np.maximum(self.inside[node], self.after[node])
        return self._states(self.before[node], last)

    def finished(self, node: int) -> Array | None:
        """Return penalty between states (first, last) of finished stages."""
        return self._states(self.before[node], self.after[node])

    @staticmethod
    def _states(first: Array, last: Array) -> Array | None:
        if len(first) == 1:
            return None
        size = len(first) ** 2
        both = first[:, None, :, None] + last[None, :, None, :]
        return both.reshape(size, size)


class StagewiseFronts:
    """Every strategy that fits is one row of a front; sums over the stage's layers give its cost."""

    def __init__(self, costs: OuterCosts, check: Check) -> None:
        self.costs = costs
        self._check = check
        every = np.arange(len(costs.layout))
        self._sums = SegmentSums(costs, every[:, None])
        layouts = np.arange(costs.p2p.shape[-1])
        self._apart = np.where(layouts == layouts[:, None], 0.0, np.inf)
        self.labels_made = 0

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Return the front of layers [first, end) on `stage`; None where no strategy fits."""
        signatures = self.costs.stage_signatures[1].tolist()
        # stages of one signature have equal fronts
        return self._build(signatures.index(signatures[stage]), first, end)

    def strategies(
        self,
        stage: int,
        first: int,
        end: int,
        origin: int,
    ) -> list[int]:
        """Return strategies, as numbers of the table, of the layers of one row of a front."""
        return [int(self.costs.choices[origin])] * (end - first)

    @remembered
    def _build(self, stage: int, first: int, end: int) -> Front | None:
        self._check()
        costs = self.costs
        sums = self._sums
        place = (stage, first, end)
        peak = sums.peak_bytes(*place)
        self.labels_made += len(peak)
        legal = costs.kind_allowed[costs.stage_kind[stage]]
        # prefix sums round; a strategy that fits to the byte must not be lost
        room = costs.capacity[stage] * (1 + SOLVER_MEMORY_TOLERANCE)
        fits = np.flatnonzero((peak <= room) & legal)
        columns = (sums.seconds(*place), sums.per_iteration(first, end), sums.sync(*place))
        values = np.stack(columns, axis=1)[fits]
        # equal layouts are interchangeable at the boundaries, others are all kept
        chosen = pareto(values, costs.layout[fits], self._apart, paid=values.shape[1])
        if not len(chosen):
            return None
        strategies = fits[chosen]
        layout = costs.layout[strategies]
        return Front(values[chosen], layout, layout, strategies)
