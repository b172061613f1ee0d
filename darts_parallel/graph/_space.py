"""The space: what every operator may choose on a mesh, and what every tensor pays between two choices.

Repeated blocks share their choices. A tensor with several consumers is a *fan*: forward it is brought to each
distinct placement once; backward the gradients of equal placement are summed before they are brought to the
producer's.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from darts_parallel.graph._layouts import (
    ALL_REDUCE,
    DeviceMeshSpec,
    State,
    Step,
    forward_state,
    gradient_state,
    local_shape,
    local_share,
    places_differ,
)
from darts_parallel.graph._prices import Kernels, operator_seconds
from darts_parallel.graph._rules import PARTIAL, REPLICATED, VARYING, Split, shard, splits
from darts_parallel.graph.operators import (
    CONSTANT,
    INPUT,
    OUTPUT,
    PARAMETER,
    RELAY,
    GraphOperator,
    ModuleGraph,
)

STATE_BYTES = 16.0
"""Bytes per trained parameter with Adam in mixed precision: 2 and 2 of weight and gradient, 12 in float32."""
SMALLEST_BLOCK = 4
"""Operators from which on equal neighbours count as repeated blocks."""


@dataclass(frozen=True)
class OperatorChoice:
    """One way to split an operator over the mesh."""

    labels: tuple[str, ...]
    """Named dimension that every axis splits, `none` where it splits none."""
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    seconds: float
    """Forward and backward on a rank, collectives inside the operator included."""
    inner: tuple[tuple[str, Step], ...] = ()
    """Collectives inside the operator: pass and step."""
    group_heads: tuple[bool, ...] = ()


@dataclass(frozen=True)
class ChoiceGroup:
    """Equal operators of repeated blocks, which choose together."""

    operators: tuple[GraphOperator, ...]
    choices: tuple[OperatorChoice, ...]


@dataclass(frozen=True)
class Fan:
    """A tensor between its producer and its consumers, or equal ones of repeated blocks.

    Index arrays say which state a choice of the producer, or of a consumer, means.
    """

    values: tuple[str, ...]
    producer: tuple[int, int]
    """Group and output index."""
    consumers: tuple[tuple[int, int], ...]
    """Groups and input indices."""
    produced: tuple[State, ...]
    demanded: tuple[State, ...]
    of_choice: tuple[np.ndarray, ...]
    """For the producer, then every consumer: index into `produced` or `demanded` by choice."""
    forward: np.ndarray
    """Seconds from a produced state to a demanded placement, `(produced, placements)`."""
    backward: np.ndarray
    """Seconds from a gradient's placement to that of the producer, `(produced, gradients)`."""
    placement_of: np.ndarray
    """Placement index of every demanded state."""
    gradient_of: np.ndarray

    @property
    def count(self) -> int:
        """Number of equal tensors."""
        return len(self.values)


@dataclass(frozen=True)
class KeptTensor:
    """Bytes that lie on a rank until backward where one of `users` chooses so: `(group, choices)`."""

    bytes: float
    users: tuple[tuple[int, tuple[int, ...]], ...]
    weight: bool
    """States of a parameter."""


@dataclass
class GraphSpace:
    """All choices of a graph on a mesh."""

    graph: ModuleGraph
    mesh: DeviceMeshSpec
    width: int
    groups: list[ChoiceGroup]
    group_of: dict[str, int]
    fans: list[Fan]
    kernels: Kernels
    memory: float | None = None
    """Bytes that states of parameters and kept tensors may take on a rank; None: any."""
    seconds: list[np.ndarray] = field(init=False)
    """Seconds of every group by choice, all its operators."""

    def __post_init__(self) -> None:
        self.seconds = [np.array([c.seconds for c in g.choices]) * len(g.operators) for g in self.groups]

    @cached_property
    def kept(self) -> list[KeptTensor]:
        """States of parameters and tensors of backward; one tensor in one layout is kept once."""
        graph = self.graph
        items: dict[tuple[str, float], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for op in graph.operators:
            use, group = self.kernels.uses[op.name], self.group_of[op.name]
            for k, choice in enumerate(self.groups[group].choices):
                slots = [(op.inputs[s], choice.inputs[s]) for s in use.kept_inputs]
                slots += [(op.outputs[s], choice.outputs[s]) for s in use.kept_outputs]
                if op.op == PARAMETER:
                    slots = [(op.outputs[0], choice.outputs[0])]
                for name, state in slots:
                    items[self.kernels.base(name), local_share(state, self.mesh.ranks)][group].add(k)
        found = []
        for (name, share), users in items.items():
            value, weight = graph.values[name], graph.producers[name][0].op == PARAMETER
            size = STATE_BYTES * value.elements if weight else value.bytes(self.width)
            held = tuple((g, tuple(sorted(ks))) for g, ks in users.items())
            found.append(KeptTensor(size * share, held, weight))
        return found

    def choice(self, assignment: Sequence[int], op: GraphOperator) -> OperatorChoice:
        """Return what an operator chooses."""
        index = self.group_of[op.name]
        return self.groups[index].choices[assignment[index]]

    def fan_seconds(self, fan: Fan, assignment: Sequence[int]) -> float:
        """Return the seconds that a tensor's moves take, forward and backward."""
        p = fan.of_choice[0][assignment[fan.producer[0]]]
        demanded = [
            array[assignment[g]] for array, (g, _) in zip(fan.of_choice[1:], fan.consumers, strict=True)
        ]
        placements = {fan.placement_of[d] for d in demanded}
        gradients = {fan.gradient_of[d] for d in demanded}
        moves = sum(fan.forward[p, f] for f in placements) + sum(fan.backward[p, g] for g in gradients)
        return fan.count * float(moves)

    def total_seconds(self, assignment: Sequence[int]) -> float:
        """Return the seconds of a step under a choice for every group."""
        compute = sum(float(s[k]) for s, k in zip(self.seconds, assignment, strict=True))
        return compute + sum(self.fan_seconds(fan, assignment) for fan in self.fans)

    def memory_bytes(self, assignment: Sequence[int], *, weights: bool = True) -> float:
        """Return the bytes of tensors kept for backward on a rank, and of parameters' states (`weights`)."""
        items = [item for item in self.kept if weights or not item.weight]
        return sum(item.bytes for item in items if any(assignment[g] in ks for g, ks in item.users))

    def local_shapes(self, op: GraphOperator, choice: OperatorChoice) -> list[list[tuple[int, ...]]]:
        """Return the shapes of a rank's parts of an operator's inputs and outputs."""
        return _local_shapes(op, self.graph, (choice.inputs, choice.outputs), self.mesh)


def build_space(
    graph: ModuleGraph,
    mesh: DeviceMeshSpec,
    width: int = 2,
    *,
    memory: float | None = None,
    ends: str = "replicated",
) -> GraphSpace:
    """List every operator's choices with their seconds, and every tensor's moves.

    Args:
        graph: The captured module.
        mesh: Ranks and links.
        width: Bytes of a floating element.
        memory: Bytes that a rank may take; None: any.
        ends: `replicated`, or `free`: the module's inputs and outputs of one shape share one placement,
            which may be a split (blocks that follow each other); `d1` splits dimension 1 of all of them.
    """
    kernels, keys = Kernels(graph), repeated_keys(graph)
    members: dict[str, list[GraphOperator]] = defaultdict(list)
    for op in graph.operators:
        value = graph.values[(op.inputs + op.outputs)[0]]
        at_end = ends == "free" and op.op in (INPUT, OUTPUT) and value.floating
        members[f"ends {value.shape}" if at_end else keys[op.name]].append(op)
    groups: list[ChoiceGroup] = []
    group_of: dict[str, int] = {}
    for operators in members.values():
        choices = _choices(operators[0], graph, mesh, width, kernels, ends)
        group_of |= {op.name: len(groups) for op in operators}
        groups.append(ChoiceGroup(tuple(operators), tuple(choices)))
    fans = list(_fans(graph, mesh, width, groups, group_of))
    return GraphSpace(graph, mesh, width, groups, group_of, fans, kernels, memory)


def repeated_keys(graph: ModuleGraph) -> dict[str, str]:
    """Return a name for every operator, equal for equal operators of blocks that repeat.

    Blocks repeat where modules that differ in an index of their path (`layers.0`, `layers.1`) run equal
    operators on equal shapes in equal order.
    """
    paths = {
        op.name: op.module if op.op != PARAMETER else op.target.rpartition(".")[0] for op in graph.operators
    }
    bodies: dict[tuple[str, str], list[tuple[object, ...]]] = defaultdict(list)
    for op in graph.operators:
        parts = paths[op.name].split(".")
        for k, part in enumerate(parts):
            if part.isdigit() and op.op != RELAY:  # the last block's output has one consumer less
                shapes = tuple(graph.shapes(op.inputs + op.outputs))
                rest = ".".join(parts[k + 1 :])
                bodies[".".join(parts[:k]), part].append((rest, op.op, shapes))
    first: dict[tuple[str, tuple[tuple[object, ...], ...]], str] = {}
    leader: dict[str, str] = {}
    for (prefix, part), body in bodies.items():
        if len(body) >= SMALLEST_BLOCK:
            leader[f"{prefix}.{part}".lstrip(".")] = first.setdefault((prefix, tuple(body)), part)
    keys: dict[str, str] = {}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for op in graph.operators:
        parts = paths[op.name].split(".")
        spelled = [leader.get(".".join(parts[: k + 1]), part) for k, part in enumerate(parts)]
        counts[paths[op.name], op.op] += 1
        name = op.target if op.op in (CONSTANT, INPUT, OUTPUT) else str(counts[paths[op.name], op.op])
        name = op.target.rpartition(".")[2] if op.op == PARAMETER else name
        keys[op.name] = f"{'.'.join(spelled)}:{op.op}:{name}"
    return keys


def _choices(
    op: GraphOperator, graph: ModuleGraph, mesh: DeviceMeshSpec, width: int, kernels: Kernels, ends: str
) -> list[OperatorChoice]:
    """Return the distinct choices of an operator on all axes."""
    known: dict[tuple[object, ...], OperatorChoice] = {}
    axes = [_axis_splits(op, graph, ranks, ends) for ranks in mesh.ranks]
    if op.op in (INPUT, OUTPUT):  # one list for both: they may choose together
        states = [tuple((s.inputs + s.outputs)[0] for s in combined) for combined in product(*axes)]
        labels = [tuple(s.label for s in combined) for combined in product(*axes)]
        pairs = [(a, b) for a, b in zip(labels, states, strict=True) if places_differ(b)]
        return [OperatorChoice(label, (state,), (state,), 0.0) for label, state in pairs]
    for combined in product(*axes):
        inputs = tuple(tuple(s.inputs[k] for s in combined) for k in range(len(op.inputs)))
        outputs = tuple(tuple(s.outputs[k] for s in combined) for k in range(len(op.outputs)))
        if not all(map(places_differ, inputs + outputs)):
            continue
        inner = tuple(_inner_steps(op, graph, combined, mesh))
        own = _local_shapes(op, graph, (inputs, outputs), mesh)
        seconds = operator_seconds(op, kernels.uses[op.name], graph, own, mesh.device, width)
        seconds += sum(mesh.seconds(step) for _, step in inner)
        heads = tuple(s.group_heads for s in combined)
        choice = OperatorChoice(tuple(s.label for s in combined), inputs, outputs, seconds, inner, heads)
        known.setdefault((inputs, outputs), choice)
    return list(known.values())


def _local_shapes(
    op: GraphOperator, graph: ModuleGraph, states: tuple[tuple[State, ...], ...], mesh: DeviceMeshSpec
) -> list[list[tuple[int, ...]]]:
    pairs = [zip(names, own, strict=True) for names, own in zip((op.inputs, op.outputs), states, strict=True)]
    return [[local_shape(graph.values[n].shape, s, mesh.ranks) for n, s in pair] for pair in pairs]


def _axis_splits(op: GraphOperator, graph: ModuleGraph, ranks: int, ends: str) -> list[Split]:
    """Return an operator's splits over one axis, with no gradient where a tensor has none."""
    counts = len(op.inputs), len(op.outputs)
    found = [Split("none", (REPLICATED,) * counts[0], (REPLICATED,) * counts[1])]
    tensors = op.inputs + op.outputs
    shape = graph.values[tensors[0]].shape if tensors else ()
    whole = [d for d in range(len(shape)) if shape[d] % ranks == 0 and shape[d] >= ranks]
    if op.op in (PARAMETER, RELAY) or (op.op in (INPUT, OUTPUT) and ends != "replicated"):
        found += [Split(f"d{d}", (shard(d),) * counts[0], (shard(d),) * counts[1]) for d in whole]
    if op.op in (INPUT, OUTPUT) and graph.values[tensors[0]].floating:
        found = [split for split in found if split.label == ends] or found
    if op.op == RELAY:
        found += [Split(s, (s,), (s,)) for s in (VARYING, PARTIAL)]
    if op.op not in (PARAMETER, INPUT, CONSTANT, OUTPUT, RELAY):
        found += splits(op, graph, ranks)
        if any(graph.values[name].needs_grad for name in op.outputs):
            found.append(Split("none*", (VARYING,) * counts[0], (VARYING,) * counts[1]))
    return [split for split in (_without_gradients(one, op, graph) for one in found) if split is not None]


def _without_gradients(split: Split, op: GraphOperator, graph: ModuleGraph) -> Split | None:
    """Return the split with plain states for tensors without gradient; None for a sum of whole numbers."""

    def plain(names: tuple[str, ...], states: tuple[str, ...]) -> tuple[str, ...]:
        pairs = zip(names, states, strict=True)
        return tuple(REPLICATED if s == VARYING and not graph.values[n].needs_grad else s for n, s in pairs)

    tensors = zip(op.inputs + op.outputs, split.inputs + split.outputs, strict=True)
    if any(state == PARTIAL and not graph.values[name].floating for name, state in tensors):
        return None
    return Split(
        split.label, plain(op.inputs, split.inputs), plain(op.outputs, split.outputs), split.group_heads
    )


def _inner_steps(
    op: GraphOperator, graph: ModuleGraph, combined: tuple[Split, ...], mesh: DeviceMeshSpec
) -> Iterator[tuple[str, Step]]:
    """Yield the collectives inside an operator: of a cross-entropy, in float32.

    Split by vocabulary: the rows' maxima, sums of exponentials and target logits. A mean over split rows:
    the number of targets that count.
    """
    if op.op != "cross_entropy_loss":
        return
    rows = graph.values[op.inputs[1]].elements
    for axis, split in enumerate(combined):
        others = [n for a, n in enumerate(mesh.ranks) if a != axis and combined[a].label == "rows"]
        if split.label == "vocabulary":
            for _ in range(3):
                yield "forward", Step(axis, ALL_REDUCE, 4.0 * rows / np.prod(others or [1]))
        elif split.label == "rows" and op.argument("reduction", 1) == 1:
            yield "forward", Step(axis, ALL_REDUCE, 4.0)


def _fans(
    graph: ModuleGraph, mesh: DeviceMeshSpec, width: int, groups: list[ChoiceGroup], group_of: dict[str, int]
) -> Iterator[Fan]:
    """Yield a fan for every tensor that may cost something, equal ones of repeated blocks together."""
    found: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[str]] = defaultdict(list)
    for name, users in graph.consumers.items():
        producer, index = graph.producers[name]
        ends = tuple((group_of[op.name], slot) for op, slot in users)
        found[group_of[producer.name], index, ends].append(name)
    for key, names in found.items():
        group, index, ends = key
        value = graph.values[names[0]]
        produced, of_producer = _distinct([c.outputs[index] for c in groups[group].choices])
        demanded, of_users = _demanded(groups, ends)
        placements, placement_of = _distinct([forward_state(s) for s in demanded])
        gradients, gradient_of = _distinct([gradient_state(s) for s in demanded])
        size, grad = value.bytes(width), value.needs_grad
        forward = np.array(
            [[mesh.move_seconds(forward_state(p), f, size) for f in placements] for p in produced]
        )
        backward = np.array(
            [[mesh.move_seconds(g, gradient_state(p), size) * grad for g in gradients] for p in produced]
        )
        if forward.any() or backward.any():
            yield Fan(
                tuple(names), (group, index), ends, tuple(produced), tuple(demanded),
                (of_producer, *of_users), forward, backward, placement_of, gradient_of,
            )  # fmt: skip


def _distinct(states: Sequence[State]) -> tuple[list[State], np.ndarray]:
    """Return the distinct states, and the index of every one among them."""
    known = list(dict.fromkeys(states))
    return known, np.array([known.index(state) for state in states])


def _demanded(
    groups: list[ChoiceGroup], ends: Sequence[tuple[int, int]]
) -> tuple[list[State], list[np.ndarray]]:
    states = [[choice.inputs[slot] for choice in groups[g].choices] for g, slot in ends]
    known = list(dict.fromkeys(state for one in states for state in one))
    return known, [np.array([known.index(state) for state in one]) for one in states]
