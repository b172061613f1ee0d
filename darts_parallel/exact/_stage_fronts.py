"""Pareto fronts of one pipeline stage: every useful way to run a segment of layers.

A layer-wise stage is solved by labels `(micro-batch seconds, seconds paid once, synchronisation seconds,
bytes, working bytes)` that grow layer by layer. Segments that hold equal layers share their labels: in a
trie of layer classes, inside a run of equal blocks only the length of the segment matters.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from darts_parallel.cost import Array, Index, OuterCosts, SegmentSums, equal_rows
from darts_parallel.exact._label_limits import LabelForms, LabelLimits
from darts_parallel.exact._pareto import pareto
from darts_parallel.exact.limits import UsableSegments
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
    """Data by which `FrontSource.strategies` names the strategies, `(n,)`."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Labels:
    """Partial stages that end at one node of the trie; n rows."""

    values: Array
    """`(n, 5)`."""
    first: Index
    current: Index
    parent: Index
    """Row of the parent node's labels."""
    choice: Index
    """Strategy of the newest layer."""


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
        pairs = np.concatenate([costs.reshard, costs.p2p]).transpose(1, 0, 2, 3)
        classes, pair_class = costs.layer_class, equal_rows(pairs)
        node = np.zeros((size + 1, size + 1), dtype=np.int64)
        known: dict[tuple[int, int, int], int] = {}
        parent, example = [0], [(0, 0)]
        for length in range(1, size + 1):
            for i in range(size + 1 - length):
                j = i + length
                above = int(node[i, j - 1])
                key = (above, int(classes[j - 1]), int(pair_class[j - 2]) if length > 1 else -1)
                if key not in known:
                    known[key] = len(parent)
                    parent.append(above)
                    example.append((i, j))
                node[i, j] = known[key]
        return SegmentTrie(node, np.array(parent), np.array(example))


def useful_choices(costs: OuterCosts) -> list[Index]:
    """Return the strategies of every layer that no other of the same layout beats in everything."""
    found: dict[int, Index] = {}
    for layer, kind in enumerate(costs.layer_class.tolist()):
        if kind not in found:
            # a strategy that a kind cannot run replaces none that it can
            rows = [costs.time[:, layer], costs.sync[:, layer], ~costs.kind_allowed * 1.0]
            rows += [
                getattr(costs, n)[None, layer]
                for n in ("per_iteration", "static", "activation", "working")
            ]
            values = np.concatenate(rows).T
            kept = [
                group[pareto(values[group])]
                for y in np.unique(costs.layout)
                if len(group := np.flatnonzero(costs.layout == y))
            ]
            found[kind] = np.sort(np.concatenate(kept))
    return [found[kind] for kind in costs.layer_class.tolist()]


@dataclass(frozen=True)
class LayerStructure:
    """Segments and strategies of one outer choice, whatever the limit on its seconds."""

    costs: OuterCosts
    trie: SegmentTrie
    groups: NodeGroups
    """Its segments by node."""
    choices: list[Index]
    """Useful strategies of every layer."""
    _entered: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    _forms: dict[int, LabelForms] = field(default_factory=dict)

    @staticmethod
    def build(costs: OuterCosts) -> "LayerStructure":
        """Find them."""
        trie = SegmentTrie.build(costs)
        return LayerStructure(costs, trie, NodeGroups.of(trie.node), useful_choices(costs))

    def forms(self, signature: int) -> LabelForms:
        """Return what is limited on the stages of a signature."""
        if signature not in self._forms:
            own = self.costs.stage_signatures[0][signature]
            self._forms[signature] = LabelForms.build(self.costs, own, self.choices)
        return self._forms[signature]

    def entered(self, kind: int) -> tuple[Array, Array]:
        """Return layout penalties before and inside every node on a kind of stage, each `(nodes, Y, Y)`."""
        if kind not in self._entered:
            costs = self.costs
            before, inside = (
                np.zeros((costs.num_layers + 1, *costs.p2p.shape[-2:])) for _ in range(2)
            )
            if costs.num_layers > 1:
                # counted as what dominance compares: without a pipeline seconds per iteration
                weight = costs.num_micro_batches if costs.pp == 1 else 1
                inside[1:-1] = penalties(costs.reshard[kind : kind + 1]) * weight
                before[1:-1] = penalties(costs.p2p.swapaxes(-1, -2)) if len(costs.p2p) else 0.0
            groups = self.groups
            ends = before[groups.begins], inside[groups.stops]
            self._entered[kind] = groups.largest(ends[0]), groups.largest(ends[1])
        return self._entered[kind]

    @cached_property
    def boundary(self) -> Array:
        """Return layout penalties at the end of a stage, `(L + 1, Y, Y)`."""
        return end_penalties(self.costs)


class LayerwiseFronts:
    """Stage fronts of one outer choice when every layer has its own strategy."""

    def __init__(
        self, costs: OuterCosts, uses: UsableSegments, check: Check, structure: LayerStructure
    ) -> None:
        self.costs, self.uses, self._check = costs, uses, check
        self.trie, self.choices = structure.trie, structure.choices
        self.labels_made = 0
        signatures, self.of_stage = costs.stage_signatures
        self._labels: list[dict[int, Labels]] = [{} for _ in signatures]
        self._fronts: list[dict[int, Front]] = [{} for _ in signatures]
        for number, (kind, in_flight, capacity) in enumerate(signatures):
            first, end, budgets = uses.budgets(number)
            limits = structure.forms(number).limits(first, end, budgets, structure.groups)
            if limits is not None:
                offsets = _NodeOffsets.build(structure, first, end, kind)
                self._labels[number] = self._grow(kind, in_flight, limits, offsets)
                self._fronts[number] = self._finish(self._labels[number], limits, offsets, capacity)

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Return the front of layers [first, end) on `stage`; None where no way is useful."""
        return self._fronts[int(self.of_stage[stage])].get(int(self.trie.node[first, end]))

    def strategies(self, stage: int, first: int, end: int, origin: int) -> list[int]:
        """Return strategies, as numbers of the table, of the layers of one row of a front."""
        node, row, result = int(self.trie.node[first, end]), origin, []
        while node:
            labels = self._labels[self.of_stage[stage]][node]
            result.append(int(self.costs.choices[labels.choice[row]]))
            row, node = int(labels.parent[row]), int(self.trie.parent[node])
        return result[::-1]

    def _grow(
        self, kind: int, in_flight: float, budgets: LabelLimits, offsets: "_NodeOffsets"
    ) -> dict[int, Labels]:
        """Return labels of all nodes that lead to a use, for one stage signature."""
        layouts = self.costs.p2p.shape[-1]
        result: dict[int, Labels] = {}
        for node in np.flatnonzero(budgets.wanted).tolist():
            self._check()
            above = int(self.trie.parent[node])
            if above and above not in result:
                continue
            labels = self._extend(
                result.get(above), int(self.trie.example[node, 1]) - 1, kind, in_flight
            )
            self.labels_made += len(labels.values)
            self._check(len(labels.values))
            kept = np.flatnonzero(budgets.admit(labels.values, node))
            states = labels.first[kept] * layouts + labels.current[kept]
            compared = budgets.relevant(labels.values[kept], node)
            kept = kept[pareto(compared, states, offsets.growing(node), paid=compared.shape[1] - 2)]
            if len(kept):
                result[node] = Labels(
                    labels.values[kept],
                    labels.first[kept],
                    labels.current[kept],
                    labels.parent[kept],
                    labels.choice[kept],
                )
        return result

    def _extend(self, labels: Labels | None, layer: int, kind: int, in_flight: float) -> Labels:
        """Return all labels with one more layer."""
        costs, choice = self.costs, self.choices[layer]
        choice = choice[costs.kind_allowed[kind, choice]]
        memory = costs.static[layer, choice] + in_flight * costs.activation[layer, choice]
        seconds, sync = costs.time[kind, layer, choice], costs.sync[kind, layer, choice]
        columns = (
            seconds,
            costs.per_iteration[layer, choice],
            sync,
            memory,
            costs.working[layer, choice],
        )
        added, layout = np.stack(columns, axis=1), costs.layout[choice]
        if labels is None:
            return Labels(added, layout, layout, np.zeros(len(choice), dtype=np.int64), choice)
        count = len(labels.values)
        values = labels.values[:, None, :] + added
        values[..., SECONDS] += costs.reshard[kind, layer - 1][labels.current[:, None], layout]
        values[..., WORKING] = np.maximum(labels.values[:, None, WORKING], added[:, WORKING])
        return Labels(
            values.reshape(-1, 5),
            np.repeat(labels.first, len(choice)),
            np.tile(layout, count),
            np.repeat(np.arange(count), len(choice)),
            np.tile(choice, count),
        )

    def _finish(
        self,
        labels: dict[int, Labels],
        budgets: LabelLimits,
        offsets: "_NodeOffsets",
        capacity: float,
    ) -> dict[int, Front]:
        """Return fronts of the nodes that can be a stage: memory is settled, three columns remain."""
        layouts, result = self.costs.p2p.shape[-1], {}
        for node, rows in labels.items():
            if not budgets.final[node]:
                continue
            # sums round; what fits to the byte must not be lost
            peak = rows.values[:, BYTES] + rows.values[:, WORKING]
            fits = np.flatnonzero(peak <= capacity * (1 + 1e-12))
            states = rows.first[fits] * layouts + rows.current[fits]
            compared = budgets.times(rows.values[fits])
            kept = fits[pareto(compared, states, offsets.finished(node), paid=compared.shape[1])]
            if len(kept):
                result[node] = Front(
                    rows.values[kept, :3], rows.first[kept], rows.current[kept], kept
                )
        return result


def penalties(rows: Array) -> Array:
    """Return the largest extra cost of layout b over layout a, whatever follows: `(N, Y, Y)`, at least 0.

    Args:
        rows: Seconds from a layout to its successor in several settings, shape `(S, N, Y, Y)`.
    """
    flat = np.moveaxis(rows, 0, -1).reshape(*rows.shape[1:3], -1)
    return np.asarray((flat[:, :, None] - flat[:, None]).max(axis=-1).clip(min=0.0))


def end_penalties(costs: OuterCosts) -> Array:
    """Return layout penalties at the end of a stage by the layer behind it, `(L + 1, Y, Y)`."""
    result = np.zeros((costs.num_layers + 1, *costs.p2p.shape[-2:]))
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
    def build(structure: LayerStructure, first: Index, end: Index, kind: int) -> "_NodeOffsets":
        """Build from the segments that may be a stage of this signature, by first layer and end, `(n,)`."""
        before, inside = structure.entered(kind)
        groups = structure.groups
        final = np.zeros(groups.node.shape, dtype=bool)
        final[first, end] = True
        chosen = final[groups.begins, groups.stops]
        largest = groups.largest_of(chosen, structure.boundary[groups.stops[chosen]])
        return _NodeOffsets(before, inside, largest)

    def growing(self, node: int) -> Array | None:
        """Return penalty between states (first, current) of labels that may still grow."""
        return self._states(self.before[node], np.maximum(self.inside[node], self.after[node]))

    def finished(self, node: int) -> Array | None:
        """Return penalty between states (first, last) of finished stages."""
        return self._states(self.before[node], self.after[node])

    @staticmethod
    def _states(first: Array, last: Array) -> Array | None:
        if len(first) == 1:
            return None
        size = len(first) ** 2
        return (first[:, None, :, None] + last[None, :, None, :]).reshape(size, size)


class StagewiseFronts:
    """Every strategy that fits is one row of a front; sums over the stage's layers give its cost."""

    def __init__(self, costs: OuterCosts, uses: UsableSegments, check: Check) -> None:
        self.costs, self.uses, self._check = costs, uses, check
        self._sums = SegmentSums(costs, np.arange(len(costs.layout))[:, None])
        self.labels_made = 0
        _, self.of_stage = costs.stage_signatures
        self._known: dict[tuple[int, int, int], Front | None] = {}

    def front(self, stage: int, first: int, end: int) -> Front | None:
        """Return the front of layers [first, end) on `stage`; None where no strategy fits."""
        key = (int(self.of_stage[stage]), first, end)
        if key not in self._known:
            self._check()
            self._known[key] = self._build(stage, first, end)
        return self._known[key]

    def strategies(self, stage: int, first: int, end: int, origin: int) -> list[int]:
        """Return strategies, as numbers of the table, of the layers of one row of a front."""
        return [int(self.costs.choices[origin])] * (end - first)

    def _build(self, stage: int, first: int, end: int) -> Front | None:
        costs, kind = self.costs, self.costs.stage_kind[stage]
        peak = self._sums.peak_bytes(stage, first, end)
        # prefix sums round; a strategy that fits to the byte must not be lost
        fits: Index = np.flatnonzero(
            (peak <= costs.capacity[stage] * (1 + 1e-12)) & costs.kind_allowed[kind]
        )
        self.labels_made += len(peak)
        seconds, sync = self._sums.seconds(stage, first, end), self._sums.sync(stage, first, end)
        values = np.stack([seconds, self._sums.per_iteration(first, end), sync], axis=1)[fits]
        # equal layouts are interchangeable at the boundaries, others are all kept
        rows = [
            group[pareto(values[group])]
            for y in np.unique(costs.layout[fits])
            if len(group := np.flatnonzero(costs.layout[fits] == y))
        ]
        if not rows:
            return None
        chosen = np.sort(np.concatenate(rows))
        layout = costs.layout[fits[chosen]]
        return Front(values[chosen], layout, layout, fits[chosen])
