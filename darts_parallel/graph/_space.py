"""The space: what every operator may choose on a mesh, and what every tensor pays between two choices.

Repeated blocks share their choices. A tensor with several consumers is a *fan*: forward it is brought to each
distinct placement once; backward the gradients of equal placement are summed before they are brought to the
producer's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from math import prod

import numpy as np

from darts_parallel.cost import LOSSLESS
from darts_parallel.graph._layouts import (
    ALL_REDUCE,
    DeviceMeshSpec,
    State,
    Step,
    divides,
    forward_state,
    gradient_state,
    local_shape,
    local_share,
)
from darts_parallel.graph._prices import Kernels, product_seconds, product_shape
from darts_parallel.graph._rules import (
    PARTIAL,
    REPLICATED,
    SLICED,
    VARYING,
    Shape,
    Split,
    shard,
    splits,
)
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
INDEXED = ("vocabulary", "experts", "groups")
"""Dimensions whose parts are looked up by a rank's index along one axis."""
MOST_MERGED = 4
"""Linear operators of one input up to which any of them may be one product."""
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
    merged: tuple[int, ...] = ()
    """Groups whose linear operators are one product with this one; all of them choose so, in equal states."""
    chained: tuple[State, ...] = ()
    """Where two `merged` ones follow each other and multiply their weights first: the states of both."""
    weights: int = 0
    """Elements of these weights' product on a rank, which backward needs in place of the first input."""


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

    count: int
    """Number of equal tensors."""
    producer: int
    """Group of the operator that makes it."""
    consumers: tuple[int, ...]
    """Groups."""
    of_choice: tuple[np.ndarray, ...]
    """For the producer, then every consumer: index of the state that it makes or demands, by choice."""
    moves: tuple[tuple[np.ndarray, np.ndarray], ...]
    """For the tensor, its gradient, and the tensor again where slices are kept: seconds between produced
    states and layouts, `(produced, layouts)`, and the layout of every demanded state, each paid once."""


@dataclass(frozen=True)
class KeptTensor:
    """Bytes that lie on a rank until backward where one of `users` chooses so: `(group, choices)`."""

    bytes: float
    users: tuple[tuple[int, tuple[int, ...]], ...]
    weight: bool
    """States of a parameter."""


@dataclass
class GraphSpace:
    """All choices of a graph on a mesh, with their seconds, and what every tensor's moves take."""

    graph: ModuleGraph
    mesh: DeviceMeshSpec
    width: int = 2
    """Bytes of a floating element."""
    memory: float | None = None
    """Bytes that states of parameters and kept tensors may take on a rank; None: any."""
    ends: str = "replicated"
    """`replicated`, or `free`: the module's inputs and outputs of one shape share one placement, which may be
    a split (blocks that follow each other); `d1` splits dimension 1 of all of them."""
    bits: tuple[int, ...] = (LOSSLESS,)
    """Bits that a new sum may be reduced with, forward: state P4, label inner@4."""
    merge: bool = False
    """Linear operators of one input, or two that follow each other, may be one product."""
    sliced: bool | None = None
    """Backward keeps slices of the inputs that split columns gather, and gathers them again; None: with
    `memory` it may."""

    @cached_property
    def kernels(self) -> Kernels:
        """Which operators share a kernel."""
        return Kernels(self.graph)

    @cached_property
    def groups(self) -> list[ChoiceGroup]:
        """Operators that choose together, with their choices."""
        keys, members = repeated_keys(self.graph), defaultdict[str, list[GraphOperator]](list)
        for op in self.graph.operators:
            value = self.graph.values[(op.inputs + op.outputs)[0]]
            at_end = self.ends == "free" and op.op in (INPUT, OUTPUT) and value.floating
            members[f"ends {value.shape}" if at_end else keys[op.name]].append(op)
        apart = [ChoiceGroup(tuple(ops), tuple(self._choices(ops[0]))) for ops in members.values()]
        return self._with_merged(apart) if self.merge else apart

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Group of every operator by name."""
        return {op.name: k for k, group in enumerate(self.groups) for op in group.operators}

    @cached_property
    def seconds(self) -> list[np.ndarray]:
        """Seconds of every group by choice, all its operators."""
        return [np.array([c.seconds for c in g.choices]) * len(g.operators) for g in self.groups]

    @cached_property
    def fans(self) -> list[Fan]:
        """Every tensor that may cost something, equal ones of repeated blocks together."""
        found: dict[tuple[int, int, tuple[tuple[int, int], ...]], list[str]] = defaultdict(list)
        for name, users in self.graph.consumers.items():
            producer, index = self.graph.producers[name]
            ends = tuple((self.group_of[op.name], slot) for op, slot in users)
            found[self.group_of[producer.name], index, ends].append(name)
        fans = (self._fan(names, *key) for key, names in found.items())
        return [fan for fan in fans if any(seconds.any() for seconds, _ in fan.moves)]

    @cached_property
    def kept(self) -> list[KeptTensor]:
        """States of parameters and tensors of backward; one tensor in one layout is kept once."""
        graph = self.graph
        items: dict[tuple[str, float, bool], dict[int, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for op in graph.operators:
            use, group = self.kernels.uses[op.name], self.group_of[op.name]
            for k, choice in enumerate(self.groups[group].choices):
                states = choice.inputs + choice.outputs
                for name, state in (((op.inputs + op.outputs)[s], states[s]) for s in use.kept):
                    share = local_share(state, self.mesh.ranks)
                    if choice.weights and name == op.inputs[0]:
                        share = choice.weights / graph.values[name].elements
                    items[self.kernels.base[name], share, SLICED in state][group].add(k)
        weights = {name for name, (op, _) in graph.producers.items() if op.op == PARAMETER}
        size = {
            name: STATE_BYTES * value.elements if name in weights else value.bytes(self.width)
            for name, value in graph.values.items()
        }
        return [
            KeptTensor(
                size[name] * share,
                tuple((g, tuple(sorted(ks))) for g, ks in users.items()),
                name in weights,
            )
            for (name, share, _), users in items.items()
        ]

    def changes(self, plan: Sequence[int], group: int, choice: int) -> dict[int, int]:
        """Return what a group's choice changes in a plan: products are merged and taken apart as a whole."""
        now, new = self._chosen(plan), self.groups[group].choices[choice]
        left = {h for g in {group, *new.merged} for h in now[g].merged}
        found = {g: self.twin(g, now[g], ()) for g in left} | {group: choice}
        return found | {g: self.twin(g, new, new.merged) for g in new.merged}

    def agreed(self, plan: Sequence[int]) -> tuple[int, ...]:
        """Take products apart that not all of their operators chose."""
        now = self._chosen(plan)
        own = [all(self.twin(h, one, one.merged) == plan[h] for h in one.merged) for one in now]
        return tuple(plan[g] if whole else self.twin(g, now[g], ()) for g, whole in enumerate(own))

    def _chosen(self, plan: Sequence[int]) -> list[OperatorChoice]:
        return [group.choices[k] for group, k in zip(self.groups, plan, strict=True)]

    def twin(self, group: int, choice: OperatorChoice, merged: tuple[int, ...]) -> int:
        """Return the choice of a group in the states of another one's, merged so; the first where none is."""
        states = (choice.chained if merged else ()) or choice.inputs + choice.outputs
        return self.twins[group].get((merged, states), 0)

    @cached_property
    def twins(self) -> list[dict[tuple[object, ...], int]]:
        """Choices of every group by what they merge and by their states."""
        keys = (
            ((c.merged, c.chained or c.inputs + c.outputs) for c in g.choices) for g in self.groups
        )
        return [{key: k for k, key in enumerate(own)} for own in keys]

    def _with_merged(self, groups: list[ChoiceGroup]) -> list[ChoiceGroup]:
        """Add the choices in which linear operators of one input are one product, of any of them.

        Each has its weights' share of the seconds of the wide product, in every state that all of them know.
        """
        found, (parallel, chained) = (
            [list(group.choices) for group in groups],
            self._linears(groups),
        )
        for together in parallel:
            for size in range(2, len(together) + 1):
                for merged in combinations(together, size):
                    ops = [groups[g].operators[0] for g in merged]
                    known = [{(c.inputs, c.outputs): c for c in groups[g].choices} for g in merged]
                    share = [self.graph.values[op.inputs[1]].elements for op in ops]
                    for states, choice in known[0].items():
                        if all(states in one for one in known) and SLICED not in states[0][0]:
                            seconds = self._wide_seconds(ops, choice) / sum(share)
                            for g, own, part in zip(merged, known, share, strict=True):
                                found[g].append(
                                    replace(own[states], seconds=seconds * part, merged=merged)
                                )
        for both in chained:
            for pair in product(*(groups[g].choices for g in both)):
                for g, way in zip(both, self._weights_first(both, groups, *pair), strict=False):
                    found[g].append(way)
        return [ChoiceGroup(g.operators, tuple(own)) for g, own in zip(groups, found, strict=True)]

    def _linears(self, groups: Sequence[ChoiceGroup]) -> Iterator[list[tuple[int, ...]]]:
        """Yield the groups of linear operators of one input, and of two of which one alone reads the other.

        The former have all a bias or none, the latter none.
        """
        graph, place = (
            self.graph,
            {op.name: g for g, group in enumerate(groups) for op in group.operators},
        )
        own = [
            op
            for op in graph.operators
            if op.op == "linear" and graph.producers[op.inputs[1]][0].op == PARAMETER
        ]
        readers, chained = (
            defaultdict[tuple[object, ...], list[int]](list),
            Counter[tuple[int, ...]](),
        )
        for op in own:
            trained = tuple(graph.values[name].needs_grad for name in op.inputs)
            readers[op.inputs[0], trained].append(place[op.name])
            after, *others = graph.consumers[op.outputs[0]]
            if len(op.inputs) == 2 and not others and after[1] == 0 and after[0] in own:
                chained[place[op.name], place[after[0].name]] += 1
        for found in (Counter(map(tuple, readers.values())), chained):
            yield [
                one
                for one, count in found.items()
                if 2 <= len(one) == len(set(one)) <= MOST_MERGED
                and all(len(groups[g].operators) == count for g in one)
            ]

    def _weights_first(
        self,
        merged: tuple[int, ...],
        groups: Sequence[ChoiceGroup],
        one: OperatorChoice,
        two: OperatorChoice,
    ) -> list[OperatorChoice]:
        """Return how linear operators `(x A) B` are `x (A B)` in the states of two choices; may be nothing.

        The tensor between them is absent: its states differ by nothing that moves it.
        """
        labels, (x, a), between = (
            list(zip(one.labels, two.labels, strict=True)),
            one.inputs,
            one.outputs[0],
        )
        inner = [pair == ("inner", "none*") for pair in labels]
        for add, pair, made, read in zip(inner, labels, between, two.inputs[0], strict=True):
            if not add and (made != read or (pair[0] != pair[1] and pair != ("none*", "columns"))):
                return []
        _, b, *bias, y = (
            tuple(PARTIAL if add and k != 1 else s for add, s in zip(inner, state, strict=True))
            for k, state in enumerate((*two.inputs, *two.outputs))
        )
        ops, values = [groups[g].operators[0] for g in merged], self.graph.values
        names = ops[0].inputs[0], ops[0].inputs[1], ops[1].inputs[1], ops[1].outputs[0]
        own_x, own_a, own_b, own_y = self.local_shapes(names, (x, a, b, y))
        grads = [values[name].needs_grad for name in names[:3]]
        rows, wide, _ = product_shape(ops[1], (own_x, (own_b[0], own_a[1])), own_y)
        weights = replace(wide, out_features=own_a[1], in_features=own_b[1])
        times = (
            (1 + sum(grads[1:]), own_b[0], weights),
            (1 + grads[0] + any(grads[1:]), rows, wide),
        )
        seconds = [
            n * product_seconds(own, gemm, self.mesh.device, self.width) for n, own, gemm in times
        ]
        states = x, a, b, y
        return [
            replace(one, seconds=seconds[0], merged=merged, chained=states),
            replace(
                two,
                inputs=(between, b, *bias),
                outputs=(y,),
                seconds=seconds[1],
                merged=merged,
                chained=states,
                weights=own_b[0] * own_a[1],
            ),
        ]

    def _wide_seconds(self, ops: Sequence[GraphOperator], choice: OperatorChoice) -> float:
        """Return the seconds of one product with the columns of all operators, forward and backward."""
        made = (self.local_shapes(op.outputs, choice.outputs)[0] for op in ops)
        parts = [
            product_shape(op, self.local_shapes(op.inputs, choice.inputs), shape)
            for op, shape in zip(ops, made, strict=True)
        ]
        wide = replace(parts[0][1], out_features=sum(gemm.out_features for _, gemm, _ in parts))
        passes = 1 + sum(self.graph.values[name].needs_grad for name in ops[0].inputs[:2])
        return passes * product_seconds(parts[0][0], wide, self.mesh.device, self.width)

    def fan_seconds(self, fan: Fan, assignment: Sequence[int]) -> float:
        """Return the seconds that a tensor's moves take, forward and backward."""
        ends = zip(fan.of_choice, (fan.producer, *fan.consumers), strict=True)
        p, *demanded = (array[assignment[group]] for array, group in ends)
        paid = (
            seconds[p, k] for seconds, layout in fan.moves for k in {layout[d] for d in demanded}
        )
        return fan.count * float(sum(paid))

    def total_seconds(self, assignment: Sequence[int]) -> float:
        """Return the seconds of a step under a choice for every group."""
        compute = sum(float(s[k]) for s, k in zip(self.seconds, assignment, strict=True))
        return compute + sum(self.fan_seconds(fan, assignment) for fan in self.fans)

    def memory_bytes(self, assignment: Sequence[int], *, weights: bool = True) -> float:
        """Return the bytes of tensors kept for backward on a rank, and of parameters' states (`weights`)."""
        items = [item for item in self.kept if weights or not item.weight]
        return sum(item.bytes for item in items if any(assignment[g] in ks for g, ks in item.users))

    def excess_bytes(self, assignment: Sequence[int]) -> float:
        """Return the bytes by which a choice for every group passes the memory."""
        return 0.0 if self.memory is None else max(self.memory_bytes(assignment) - self.memory, 0.0)

    def local_shapes(self, names: Sequence[str], states: Sequence[State]) -> list[Shape]:
        """Return the shapes of a rank's parts of values."""
        pairs = zip(names, states, strict=False)
        return [
            local_shape(self.graph.values[name].shape, state, self.mesh.ranks)
            for name, state in pairs
        ]

    def operator_seconds(
        self,
        op: GraphOperator,
        inputs: Sequence[State],
        outputs: Sequence[State],
        training: bool = True,
    ) -> float:
        """Return the seconds of an operator in some states on a rank, backward too where it is `training`."""
        shapes = self.local_shapes(op.inputs, inputs), self.local_shapes(op.outputs, outputs)
        return self.kernels.seconds(op, shapes, self.mesh.device, self.width, training)

    def _choices(self, op: GraphOperator) -> list[OperatorChoice]:
        """Return the distinct choices of an operator on all axes."""
        known: dict[tuple[object, ...], OperatorChoice] = {}
        for combined in product(*(self._splits(op, ranks) for ranks in self.mesh.ranks)):
            inputs = tuple(tuple(s.inputs[k] for s in combined) for k in range(len(op.inputs)))
            outputs = tuple(tuple(s.outputs[k] for s in combined) for k in range(len(op.outputs)))
            if op.op in (INPUT, OUTPUT):  # one list for both: they may choose together
                inputs = outputs = inputs + outputs
            if (inputs, outputs) not in known and self._possible(op, combined, inputs + outputs):
                inner = tuple(self._inner_steps(op, combined))
                seconds = self.operator_seconds(op, inputs, outputs)
                seconds += sum(self.mesh.seconds(step) for _, step in inner)
                labels = tuple(s.label for s in combined)
                known[inputs, outputs] = OperatorChoice(labels, inputs, outputs, seconds, inner)
        return list(known.values())

    def _possible(
        self, op: GraphOperator, combined: Sequence[Split], states: Sequence[State]
    ) -> bool:
        """Return whether the axes together divide all tensors, and give a rank the same parts of each."""
        values = [self.graph.values[name] for name in op.inputs + op.outputs]
        if not all(
            divides(v.shape, s, self.mesh.ranks) for v, s in zip(values, states, strict=False)
        ):
            return False
        # one dimension on both axes: whoever lacks the parts of the first has not those of the second
        torn = (s[1].startswith("S") and not s[0].startswith("S") for s in states)
        once = len({split.label for split in combined}) == len(combined)
        return once or not (combined[0].label in INDEXED or any(torn))

    def _splits(self, op: GraphOperator, ranks: int) -> list[Split]:
        """Return an operator's splits over one axis, with no gradient where a tensor has none."""
        names, values = op.inputs + op.outputs, self.graph.values

        def alike(label: str, state: str) -> Split:
            return Split(label, (state,) * len(op.inputs), (state,) * len(op.outputs))

        found, first = [alike("none", REPLICATED)], values[names[0]]
        whole = [d for d, size in enumerate(first.shape) if size and size % ranks == 0]
        if op.op in (PARAMETER, RELAY) or (op.op in (INPUT, OUTPUT) and self.ends != "replicated"):
            found += [alike(f"d{d}", shard(d)) for d in whole]
        if op.op in (INPUT, OUTPUT) and first.floating:
            found = [split for split in found if split.label == self.ends] or found
        if op.op == RELAY:
            found += [alike(state, state) for state in (VARYING, PARTIAL)]
        if op.op not in (PARAMETER, INPUT, CONSTANT, OUTPUT, RELAY):
            found += self._with_slices(op, splits(op, self.graph, ranks))
            if any(values[name].needs_grad for name in op.outputs):
                found.append(alike("none*", VARYING))
                found += self._lossy(op, found)
        plain = []
        for split in found:
            pairs = list(zip(names, split.inputs + split.outputs, strict=True))
            if all(values[name].floating or state != PARTIAL for name, state in pairs):
                states = tuple(
                    s if values[n].needs_grad or s != VARYING else REPLICATED for n, s in pairs
                )
                plain.append(Split(split.label, states[: len(op.inputs)], states[len(op.inputs) :]))
        return plain

    def _with_slices(self, op: GraphOperator, found: list[Split]) -> list[Split]:
        """Add the choices that keep a slice of a gathered input; with `sliced` they alone split columns."""
        gathered = [split for split in found if split.label == "columns"]
        if op.op != "linear" or not (
            self.memory is not None if self.sliced is None else self.sliced
        ):
            return found
        x, producer = self.graph.values[op.inputs[0]], self.graph.producers[op.inputs[1]][0]
        whole = (
            producer.op == PARAMETER and 0 in self.kernels.uses[op.name].kept and len(x.shape) > 1
        )
        if not whole or x.elements % prod(self.mesh.ranks):
            return found
        slices = [replace(split, inputs=(SLICED, *split.inputs[1:])) for split in gathered]
        return [split for split in found if not (self.sliced and split in gathered)] + slices

    def _lossy(self, op: GraphOperator, found: Iterable[Split]) -> Iterator[Split]:
        """Yield the splits that make a sum, which is reduced with few bits as soon as it is made."""
        one = len(op.outputs) == 1 and self.graph.values[op.outputs[0]].elements > 1
        for split, bits in product([s for s in found if s.outputs == (PARTIAL,)] * one, self.bits):
            if bits < LOSSLESS and PARTIAL not in split.inputs:
                yield Split(f"{split.label}@{bits}", split.inputs, (f"{PARTIAL}{bits}",))

    def _inner_steps(
        self, op: GraphOperator, combined: tuple[Split, ...]
    ) -> Iterator[tuple[str, Step]]:
        """Yield the collectives inside an operator: of a cross-entropy, in float32.

        Split by vocabulary: the rows' maxima, sums of exponentials and target logits. A mean over split rows:
        the number of targets that count.
        """
        if op.op != "cross_entropy_loss":
            return
        rows, ranks = self.graph.values[op.inputs[1]].elements, self.mesh.ranks
        for axis, split in enumerate(combined):
            others = [n for a, n in enumerate(ranks) if a != axis and combined[a].label == "rows"]
            if split.label == "vocabulary":
                yield from [
                    ("forward", Step(axis, ALL_REDUCE, 4.0 * rows / np.prod(others or [1])))
                ] * 3
            elif split.label == "rows" and op.argument("reduction", 1) == 1:
                yield "forward", Step(axis, ALL_REDUCE, 4.0)

    def _fan(
        self, names: list[str], group: int, index: int, ends: tuple[tuple[int, int], ...]
    ) -> Fan:
        """Price the moves of equal tensors from a producer to its consumers."""
        value, mesh = self.graph.values[names[0]], self.mesh
        made = [choice.outputs[index] for choice in self.groups[group].choices]
        wants = [[choice.inputs[slot] for choice in self.groups[g].choices] for g, slot in ends]
        produced, demanded = list(dict.fromkeys(made)), list(dict.fromkeys(chain(*wants)))
        ahead, back = (list(map(layout, demanded)) for layout in (forward_state, gradient_state))
        again = [state if SLICED in state else () for state in demanded]
        size, moves = value.bytes(self.width), []
        ways: list[tuple[list[State], Callable[[State, State], tuple[State, State]]]] = [
            (ahead, lambda p, k: (forward_state(p), k)),
            (back, lambda p, k: (k, gradient_state(p) if value.needs_grad else k)),
            (again, lambda _, k: (k, forward_state(k))),
        ]
        for layouts, path in ways[: 2 + any(again)]:
            known = list(dict.fromkeys(layouts))
            steps = [[mesh.steps(*path(p, k), size) for k in known] for p in produced]
            seconds = [[sum(map(mesh.seconds, own)) for own in row] for row in steps]
            moves.append((np.array(seconds), _index(layouts, known)))
        of_choice = (_index(made, produced), *(_index(one, demanded) for one in wants))
        return Fan(len(names), group, tuple(g for g, _ in ends), of_choice, tuple(moves))


def _index(states: Iterable[State], known: list[State]) -> np.ndarray:
    """Return the place of every state among the known ones."""
    return np.array([known.index(state) for state in states])


def repeated_keys(graph: ModuleGraph) -> dict[str, str]:
    """Return a name for every operator, equal for equal operators of blocks that repeat.

    Blocks repeat where modules that differ in an index of their path (`layers.0`, `layers.1`) run equal
    operators on equal shapes in equal order.
    """
    paths = {
        op.name: op.target.rpartition(".")[0] if op.op == PARAMETER else op.module
        for op in graph.operators
    }
    bodies: dict[tuple[str, ...], list[object]] = defaultdict(list)
    for op in graph.operators:
        parts = paths[op.name].split(".")
        for k, part in enumerate(parts):
            if part.isdigit() and op.op != RELAY:  # the last block's output has one consumer less
                shapes = tuple(graph.shapes(op.inputs + op.outputs))
                bodies[tuple(parts[: k + 1])].append((parts[k + 1 :], op.op, shapes))
    first: dict[tuple[object, ...], str] = {}
    leader = {
        path: first.setdefault((path[:-1], str(body)), path[-1])
        for path, body in bodies.items()
        if len(body) >= SMALLEST_BLOCK
    }
    keys: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for op in graph.operators:
        path, parts = paths[op.name], paths[op.name].split(".")
        spelled = [leader.get(tuple(parts[: k + 1]), part) for k, part in enumerate(parts)]
        counts[path, op.op] += 1
        name = op.target if op.op in (CONSTANT, INPUT, OUTPUT) else str(counts[path, op.op])
        name = op.target.rpartition(".")[2] if op.op == PARAMETER else name
        keys[op.name] = f"{'.'.join(spelled)}:{op.op}:{name}"
    return keys
