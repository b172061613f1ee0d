"""Named dimensions of operators: which dimensions of inputs and outputs are one, and may be split together.

A rule holds for overloads of torch's operators, i.e. for their schemas (`RULES`), and for the elementwise
operators that torch tags `pointwise`. It says what else must hold: the number of dimensions, the values of
arguments. A rule yields `Split`s. A split of one named dimension over a mesh axis gives every tensor of the
operator a state (`_states`): split where the tensor has the dimension, a varying copy where it lacks the
dimension, as each rank adds to its gradient, and a partial sum where the dimension is summed over. Truths
are no partial sums, and no sum goes through a cast to whole numbers.
An operator without a rule has no split: it is replicated, and reported.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod

import torch
from torch.fx import Node

from darts_parallel.graph._states import PARTIAL, REPLICATED, VARYING, Shape, shard
from darts_parallel.graph.operators import (
    GROUPED,
    OPERATORS,
    GraphOperator,
    GraphValue,
    ModuleGraph,
    kinds,
)

Place = int | str | None
"""Dimension of a tensor that is split, or a state; None: the tensor lacks the dimension."""


@dataclass(frozen=True)
class Split:
    """One named dimension of an operator, split over a mesh axis."""

    label: str
    states: tuple[str, ...]
    """States of inputs, then of outputs."""


def _state(place: Place) -> str:
    if place is None:
        return VARYING
    return shard(place) if isinstance(place, int) else place


@dataclass(frozen=True)
class RuleCall:
    """An operator with the shapes of its tensors and the ranks that would share it."""

    op: GraphOperator
    inputs: list[Shape]
    outputs: list[Shape]
    ranks: int

    def split(
        self,
        label: str,
        inputs: Iterable[Place],
        made: Place,
    ) -> Split:
        """Return the split of a named dimension from its place in every input, and in all outputs."""
        states = map(_state, inputs)
        return Split(label, (*states, *[_state(made)] * len(self.outputs)))

    def mapped(
        self,
        old: int,
        new: int,
    ) -> Split:
        """Return the split of one dimension of all inputs that is another one of all outputs."""
        return self.split(f"d{new}", [old] * len(self.inputs), new)

    def dims(self, rank: int) -> list[int]:
        """Return the dimensions that the operator is told, counted from the front; all where none is."""
        told = self.op.argument("dims", self.op.argument("dim"))
        dims = [told] if isinstance(told, int) else told
        return sorted(int(d) % max(rank, 1) for d in dims or range(rank))


Rule = Callable[[RuleCall], Iterator[Split]]
PASSING = kinds("passing")
GROUPED_CONVOLUTION = "bgX,gX,g->bgX"
PLAIN = re.compile(r"(?!.*([a-z])[a-z]*\1)[a-z,]+->[a-z]*")
"""Equations of einsum that name their output, without ellipsis and diagonal."""


def _by_overload(table: str) -> dict[str, str]:
    """Return the keys of a table by the overloads that they list."""
    found: dict[str, str] = {}
    for key, names in OPERATORS[table].items():
        found |= dict.fromkeys(names.split(), key)
    return found


SIGNATURES = _by_overload("signatures")


@dataclass(frozen=True)
class Signature:
    """The dimensions of an operator's tensors by name."""

    inputs: list[list[str]]
    added: list[bool]
    """The input is added to the output."""
    output: list[str]

    def places(
        self,
        letter: str,
        shapes: Sequence[Shape],
    ) -> list[Place]:
        """Return where every input has a dimension; a size of 1 is broadcast where others are larger."""
        sizes = []
        for names, shape in zip(self.inputs, shapes, strict=True):
            sizes.append(shape[names.index(letter)] if letter in names else 0)
        places = list[Place]()
        for names, size, added in zip(self.inputs, sizes, self.added, strict=False):
            if size > 1 or (size == 1 == max(sizes)):
                places.append(names.index(letter))
            else:
                places.append(PARTIAL if added and letter not in self.output else None)
        return places


def _spelled_term(
    term: str,
    rank: int,
) -> list[str]:
    """Name every dimension of a tensor: of the term Rk in three dimensions, R2, R1 and k."""
    before, repeated, after = re.fullmatch("([^A-Z]*)([A-Z]?)(.*)", term).groups()  # type: ignore[union-attr]
    count = rank - len(before + after) if repeated else 0
    middle = [f"{repeated}{count - d}" for d in range(count)]
    names = [*before, *middle, *after]
    return names[max(len(names) - rank, 0) :]


def signature_of(
    op: GraphOperator,
    inputs: Sequence[Shape],
    output: Shape,
) -> Signature:
    """Return the names of the dimensions of an operator that has a signature, or is an einsum."""
    text = SIGNATURES.get(op.overload) or str(op.argument("equation"))
    if op.op.startswith("conv") and op.argument("groups", 1) > 1:
        text = GROUPED_CONVOLUTION
    if 0 < _pixels(op) == len(inputs[0]) - 1:  # no batch
        text = text.replace("b", "")
    left, _, right = text.replace(" ", "").partition("->")
    terms = left.split(",")[: len(inputs)]
    names = []
    for term, shape in zip(terms, inputs, strict=False):
        names.append(_spelled_term(term.strip("+"), len(shape)))
    added = [term.startswith("+") for term in terms]
    return Signature(names, added, _spelled_term(right, len(output)))


def _pixels(op: GraphOperator) -> int:
    """Return the dimensions behind channels of a convolution or a pool; 0 for others."""
    named = re.search(r"(\d)d", op.op)
    return int(named[1]) if named else 0


def _has_signature(call: RuleCall) -> bool:
    """Return whether an operator's signature describes this call of it."""
    op = call.op
    ranks = [len(shape) for shape in call.inputs]
    if pixels := _pixels(op):
        return ranks[0] in (1 + pixels, 2 + pixels)
    if op.op == "einsum":
        return PLAIN.fullmatch(op.argument("equation").replace(" ", "")) is not None
    if op.op == "matmul":
        return min(ranks) >= 2
    if op.op in GROUPED:
        return ranks == [2, 3, 1]
    if op.op == "embedding":
        return not op.argument("scale_grad_by_freq", False)
    return {op.argument("alpha", 1), op.argument("beta", 1)} == {1}


def signed(call: RuleCall) -> Iterator[Split]:
    """Yield every letter of an operator's signature, or of the equation of an einsum."""
    if not _has_signature(call):
        return
    op = call.op
    signature = signature_of(op, call.inputs, call.outputs[0])
    labels = {} if op.op == "einsum" else OPERATORS["labels"]
    groups = int(op.argument("num_groups", op.argument("groups", 1)))
    for letter in dict.fromkeys(chain(signature.output, *signature.inputs)):
        label = labels.get(letter[0], letter[0])
        torn = label == "groups" and groups % call.ranks > 0
        if torn or letter.startswith("X"):
            continue
        made: Place = PARTIAL
        if letter in signature.output:
            made = signature.output.index(letter)
            label += str(made) if letter[1:] else ""
        yield call.split(label, signature.places(letter, call.inputs), made)


def _aligned(
    shapes: Sequence[Shape],
    whole: Shape,
    dim: int,
) -> list[Place]:
    """Return where tensors that are broadcast to a whole shape have a dimension of it."""
    places = list[Place]()
    for shape in shapes:
        place = dim - len(whole) + len(shape)
        present = place >= 0 and shape[place] == whole[dim]
        places.append(place if present else None)
    return places


def pointwise(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of the output, as broadcasting aligns the inputs, and sums that go through."""
    whole = call.outputs[0]
    for d in range(len(whole)):
        yield call.split(f"d{d}", _aligned(call.inputs, whole, d), d)
    count = len(call.inputs)
    linear = {"mul": count, "div": not call.op.argument("rounding_mode")}
    # each of the first inputs alone
    for k in range(linear.get(call.op.op, 0)):
        places = list[Place]([None] * count)
        places[k] = PARTIAL
        yield call.split("partial", places, PARTIAL)


def reshaped(call: RuleCall) -> Iterator[Split]:
    """Yield the leading dimension of every group of dimensions that a view joins or parts.

    Groups begin where the sizes before them have equal products.
    """
    old = call.inputs[0]
    new = call.outputs[0]
    begins = {prod(new[:d]): d for d, size in enumerate(new) if size > 1}
    for d, size in enumerate(old):
        made = begins.get(prod(old[:d]))
        if size > 1 and made is not None:
            yield call.mapped(d, made)


def permuted(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions of permute, transpose and t."""
    numbers = range(len(call.inputs[0]))
    sizes = torch.empty([d + 1 for d in numbers], device="meta")
    node = call.op.node
    for new, size in enumerate(node.target(sizes, *node.args[1:]).shape):
        yield call.mapped(size - 1, new)


def along(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions that an operator does not work along, and that all its tensors have."""
    rank = len(call.inputs[0])
    tensors = call.inputs + call.outputs
    if set(map(len, tensors)) != {rank}:
        return
    worked = call.dims(rank)
    if call.op.op in ("tril", "triu"):
        worked = [rank - 2, rank - 1]
    elif call.op.op == "repeat":  # a dimension that is repeated has another size
        worked = []
    elif call.op.op in ("pad", "constant_pad_nd"):
        # a dimension that loses as much as it gains keeps its size
        widths = enumerate(call.op.argument("pad"))
        worked = [rank - 1 - k // 2 for k, width in widths if width]
    for d, sizes in enumerate(zip(*tensors, strict=True)):
        if len(set(sizes)) == 1 and d not in worked:
            yield call.mapped(d, d)


def around(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions that are neither reduced, taken away nor put in; sums of a part are partial."""
    old = len(call.inputs[0])
    new = len(call.outputs[0])
    rank = max(old, new)
    worked = call.dims(rank)
    if call.op.op.startswith("view_as"):  # real and imaginary part come last
        worked = [rank - 1]
    others = [d for d in range(rank) if d not in worked]
    for k, d in enumerate(others):
        yield call.mapped(d if old >= new else k, d if new >= old else k)
    if call.op.op in ("sum", "mean"):
        for d in worked:
            yield call.split(f"d{d}", [d], PARTIAL)


def attention(call: RuleCall) -> Iterator[Split]:
    """Yield batch, heads and, without a causal flag, the queries of scaled dot-product attention.

    Where ranks outnumber the key-value heads, each rank takes those of its query heads out of whole ones.
    """
    q, k, _, *masks = call.inputs
    heads = len(q) - 3
    queries = len(q) - 2
    shared = q[heads] != k[heads] and k[heads] % call.ranks != 0
    """Several ranks would share a key-value head."""
    for d in range(heads):
        yield call.split(f"batch{d}", [d, d, d, *_aligned(masks, q, d)], d)
    if heads >= 0 and (not shared or call.ranks % k[heads] == 0):
        place = None if shared else heads
        yield call.split("heads", [heads, place, place, *_aligned(masks, q, heads)], heads)
    if not call.op.argument("is_causal", False):
        places = _aligned(masks, q, queries)
        yield call.split("queries", [queries, None, None, *places], queries)


def normalized(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions before those that layer_norm and rms_norm normalize."""
    worked = call.op.argument("normalized_shape")
    return islice(pointwise(call), len(call.inputs[0]) - len(worked))


def batch_normalized(call: RuleCall) -> Iterator[Split]:
    """Yield channels, and the batch where running statistics are used."""
    others = len(call.inputs) - 1
    found = [call.split("channels", [1] + [0] * others, 1)]
    if not call.op.argument("training", False):
        found.append(call.split("batch", [0, *[None] * others], 0))
    for split in found:
        statistics = (REPLICATED,) * (len(call.outputs) - 1)
        yield Split(split.label, split.states[: others + 2] + statistics)


def cross_entropy(call: RuleCall) -> Iterator[Split]:
    """Yield rows (partial mean or sum) and the vocabulary of a plain cross-entropy of `(rows, classes)`."""
    ranks = [len(shape) for shape in call.inputs]
    smoothed = call.op.argument("label_smoothing", 0.0) > 0.0
    if ranks == [2, 1] and not smoothed:
        reduced = call.op.argument("reduction", 1) in (1, 2)
        yield call.split("rows", [0, 0], PARTIAL if reduced else 0)
        yield call.split("vocabulary", [1, None], REPLICATED)


def indexed(call: RuleCall) -> Iterator[Split]:
    """Yield the chosen rows and the other dimensions, where one dimension is indexed by whole numbers."""
    indices = call.op.argument("indices", [])
    places = [k for k, one in enumerate(indices) if isinstance(one, Node)]
    if len(places) != 1 or len(call.inputs) != 2:
        return
    at = places[0]
    chosen = len(call.inputs[1])
    for d in range(len(call.inputs[0])):
        if d != at:
            yield call.split(f"d{d}", [d, None], d if d < at else d + chosen - 1)
    for d in range(chosen):
        yield call.split(f"rows{d}", [None, d], at + d)
    yield call.split("partial", [PARTIAL, None], PARTIAL)


def index_selected(call: RuleCall) -> Iterator[Split]:
    """Yield the chosen rows and the other dimensions of index_select."""
    rank = len(call.inputs[0])
    for d in range(rank):
        places = [None, 0] if d in call.dims(rank) else [d, None]
        yield call.split(f"d{d}", places, d)


RULES: dict[str, Rule] = dict.fromkeys(SIGNATURES, signed)
"""Rules by overload."""
for _overload, _rule in _by_overload("rules").items():
    RULES[_overload] = globals()[_rule]


def rule_of(op: GraphOperator) -> Rule | None:
    """Return the rule of an operator, None where it is unknown."""
    return RULES.get(op.overload) or (pointwise if op.pointwise else None)


def unknown_operators(graph: ModuleGraph) -> list[GraphOperator]:
    """Return the operators that have no rule and make no constant: every rank computes them."""
    creators = kinds("creators")
    inner = [op for op in graph.computing if op.inputs and op.op not in creators]
    return [op for op in inner if rule_of(op) is None]


def splits(
    op: GraphOperator,
    graph: ModuleGraph,
    ranks: int,
) -> list[Split]:
    """Return the named dimensions of an operator, without "none"; ranks may share them unevenly."""
    rule = rule_of(op)
    if rule is None or not op.inputs:
        return []
    call = RuleCall(op, graph.shapes(op.inputs), graph.shapes(op.outputs), ranks)
    found = list(rule(call))
    values = [graph.values[name] for name in op.tensors]
    rounds = values[0].floating and not values[-1].floating
    if _is_linear(op) and not rounds:
        found.append(call.split("partial", [PARTIAL] * len(op.inputs), PARTIAL))
    return [split for split in dict.fromkeys(found) if not _sums_truths(split, values)]


def _is_linear(op: GraphOperator) -> bool:
    """Return whether a sum of inputs makes a sum of outputs, without a constant that is added."""
    if op.op not in PASSING or op.argument("value"):
        return False
    return op.op not in ("add", "sub") or len(op.inputs) == 2


def _sums_truths(split: Split, values: Sequence[GraphValue]) -> bool:
    """Return whether a partial sum would be of truths."""
    pairs = zip(split.states, values, strict=True)
    return any(state == PARTIAL and value.truth for state, value in pairs)
