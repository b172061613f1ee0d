"""Named dimensions of operators: which dimensions of inputs and outputs are one, and may be split together.

A rule yields `Split`s. Splitting one named dimension over a mesh axis gives every tensor of the operator a
*state*, i.e. a placement of the tensor and one of its gradient: `S0`, `S1`, ... (both `Shard`) where it has
the dimension; `R` (both `Replicate`) where all ranks do the same; `R*` (gradient `Partial`) where it lacks
the dimension, as each rank adds to its gradient (`R*S`: backward keeps a slice of it and gathers it again);
`P` (`Partial`, then `Replicate`) where it is summed over.
An operator without a rule has no split: it is replicated, and reported.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod

from torch.fx import Node

from darts_parallel.graph.operators import GraphOperator, ModuleGraph, kinds

REPLICATED, VARYING, SLICED, PARTIAL = "R", "R*", "R*S", "P"
Shape = tuple[int, ...]
Place = int | str | None
"""Dimension of a tensor that is split, or a state; None: the tensor lacks the dimension."""


@dataclass(frozen=True)
class Split:
    """One named dimension of an operator, split over a mesh axis."""

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class RuleCall:
    """An operator with the shapes of its tensors and the ranks that would share it."""

    op: GraphOperator
    inputs: list[Shape]
    outputs: list[Shape]
    ranks: int

    def dims(self, rank: int | None = None) -> list[int]:
        """Return the dimensions that the operator is told, counted from the front; where none is, all."""
        rank = len(self.inputs[0]) if rank is None else rank
        told = self.op.argument("dims", self.op.argument("dim"))
        told = [told] if isinstance(told, int) else told or range(rank)
        return sorted(int(d) % max(rank, 1) for d in told)


Rule = Callable[[RuleCall], Iterator[Split]]
PASSING = kinds(
    "add sub neg clone alias detach contiguous lift_fresh_copy _to_copy to relay view reshape _unsafe_view "
    "flatten unflatten squeeze permute transpose t unsqueeze expand tril triu pad constant_pad_nd select "
    "unbind stack sum mean repeat_interleave slice split split_with_sizes chunk cat flip roll"
)
"""All linear operators: partial sums of their tensors go through."""
LABELS = {
    "b": "batch",
    "c": "columns",
    "e": "experts",
    "g": "groups",
    "k": "inner",
    "n": "channels",
    "r": "rows",
    "v": "vocabulary",
    "B": "batch",
    "R": "rows",
}
"""Names of the letters of `SIGNATURES`."""
_SIGNED = {
    "Rk,ck,+c->Rc": "linear",
    "Brk,Bkc->Brc": "mm bmm matmul",
    "+Brc,Brk,Bkc->Brc": "addmm baddbmm",
    "bkX,ckX,+c->bcX": "conv1d conv2d conv3d",
    "bgX,gX,g->bgX": "grouped_convolution",
    "bgX,g,g->bgX": "group_norm",
    "vc,R->Rc": "embedding",
    "Xk,ekc,X->Xc": "grouped_mm_fallback _grouped_mm grouped_mm",
    "bnX->bnX": "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "upsample_nearest2d upsample_bilinear2d max_pool2d_with_indices",
}
SIGNATURES = {name: signature for signature, names in _SIGNED.items() for name in names.split()}
"""Dimensions of inputs and output, a letter each: `B` and `R` any number of them, aligned at the right, `X`
any number that stay whole; `+`: the tensor is added. What the output lacks is summed over. Of experts (sorted
rows with their own weights) a rank computes the rows of its own ones and leaves zeros for the others."""


def shard(dim: int) -> str:
    """Return the state of a tensor that is split in a dimension."""
    return f"S{dim}"


def named(label: str, inputs: Iterable[Place], outputs: Iterable[Place]) -> Split:
    """Return the split of a named dimension from its place in every tensor."""

    def state(place: Place) -> str:
        return VARYING if place is None else shard(place) if isinstance(place, int) else place

    return Split(label, tuple(map(state, inputs)), tuple(map(state, outputs)))


def _spelled(term: str, rank: int) -> list[str]:
    """Name every dimension of a tensor: those of `Rk` in three dimensions are R2, R1 and k."""
    found = next((c for c in term if c.isupper()), "")
    if not found:
        return list(term)[-rank:] if rank else []
    before, after = term.split(found)
    count = rank - len(before) - len(after)
    return [*before, *(f"{found}{count - d}" for d in range(count)), *after][-rank:]


def spelled(
    op: GraphOperator, inputs: Sequence[Shape], output: Shape
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the terms of an operator's signature, and the names of its tensors' dimensions."""
    kind = op.op
    if kind.startswith("conv") and int(op.argument("groups", 1)) > 1:
        kind = "grouped_convolution"
    signature = str(op.argument("equation", SIGNATURES.get(kind))).replace(" ", "")
    left, _, right = signature.partition("->")
    terms = left.split(",")
    names = [_spelled(t.strip("+"), len(shape)) for t, shape in zip(terms, inputs, strict=False)]
    return terms, names, _spelled(right, len(output))


def signed(call: RuleCall) -> Iterator[Split]:
    """Yield every letter of an operator's signature, or of the equation of an einsum."""
    kind, groups = call.op.op, int(call.op.argument("num_groups", call.op.argument("groups", 1)))
    equation, labels = str(call.op.argument("equation", "->")).replace(" ", ""), LABELS
    if kind == "einsum":
        labels = {}
        terms = equation.replace("->", ",").split(",")
        if (
            "->" not in equation
            or not "".join(terms).islower()
            or any(len(set(t)) < len(t) for t in terms)
        ):
            return
    scaled = call.op.argument("beta", 1) != 1 or call.op.argument("alpha", 1) != 1
    ranks = [len(shape) for shape in call.inputs]
    if (
        scaled
        or (kind == "matmul" and min(ranks) < 2)
        or ("grouped_mm" in kind and ranks != [2, 3, 1])
    ):
        return
    terms, names, out = spelled(call.op, call.inputs, call.outputs[0])
    for letter in dict.fromkeys(chain(out, *names)):
        if letter.startswith("X") or (labels.get(letter) == "groups" and groups % call.ranks):
            continue
        made, places = out.index(letter) if letter in out else PARTIAL, list[Place]()
        sizes = [
            dict(zip(own, shape, strict=True)).get(letter, 0)
            for own, shape in zip(names, call.inputs, strict=True)
        ]
        for term, own, size in zip(terms, names, sizes, strict=False):
            there = size > 1 or (size and max(sizes) == 1)
            added = PARTIAL if term.startswith("+") and made == PARTIAL else None
            places.append(own.index(letter) if there else added)
        number = str(out.index(letter)) if letter[1:] else ""
        yield named(labels.get(letter[0], letter[0]) + number, places, [made] * len(call.outputs))


def _aligned(shapes: Sequence[Shape], whole: Shape, dim: int) -> list[Place]:
    """Return where tensors that are broadcast to a whole shape have a dimension of it."""
    own = (dim - len(whole) + len(shape) for shape in shapes)
    return [
        k if k >= 0 and shape[k] == whole[dim] else None
        for k, shape in zip(own, shapes, strict=True)
    ]


def pointwise(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of the output, as broadcasting aligns the inputs, and sums that go through."""
    for d in range(len(call.outputs[0])):
        yield named(f"d{d}", _aligned(call.inputs, call.outputs[0], d), [d] * len(call.outputs))
    kind, tensors = call.op.op, len(call.inputs)
    if kind == "mul" or (kind == "div" and not call.op.argument("rounding_mode")):
        for k in range(tensors if kind == "mul" else 1):
            yield named("partial", [PARTIAL if j == k else None for j in range(tensors)], [PARTIAL])


def _mapped(call: RuleCall, pairs: Iterable[tuple[int, int]]) -> Iterator[Split]:
    """Yield pairs of a dimension of all inputs and the same one of all outputs."""
    for old, new in pairs:
        yield named(f"d{new}", [old] * len(call.inputs), [new] * len(call.outputs))


def reshaped(call: RuleCall) -> Iterator[Split]:
    """Yield the leading dimension of every smallest group with equal products that a view joins or parts."""
    old, new, i, j = call.inputs[0], call.outputs[0], 0, 0
    while i < len(old) or j < len(new):
        a, b = i + 1, j + 1
        while (left := prod(old[i:a])) != (right := prod(new[j:b])):
            a, b = (a + 1, b) if left < right else (a, b + 1)
        first = [k for k, size in enumerate(old[:a]) if k >= i and size > 1][:1]
        second = [k for k, size in enumerate(new[:b]) if k >= j and size > 1][:1]
        yield from _mapped(call, zip(first, second, strict=False))
        i, j = a, b


def permuted(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions of permute, transpose and t."""
    rank = len(call.inputs[0])
    order = list(range(rank))
    if call.op.op == "permute":
        order = [int(d) % rank for d in call.op.argument("dims")]
    elif rank >= 2:
        a, b = (int(call.op.argument(name, d)) % rank for d, name in enumerate(("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return _mapped(call, ((old, new) for new, old in enumerate(order)))


def along(call: RuleCall) -> Iterator[Split]:
    """Yield all dimensions but those that an operator works along, where sizes are equal in all tensors."""
    shape, kind = call.inputs[0], call.op.op
    whole = [] if kind in ("pad", "constant_pad_nd") else call.dims()
    whole = [len(shape) - 2, len(shape) - 1] if kind in ("tril", "triu") else whole
    for d, size in enumerate(shape):
        if d not in whole and all(
            len(s) == len(shape) and s[d] == size for s in call.inputs + call.outputs
        ):
            yield from _mapped(call, [(d, d)])


def around(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside those that are reduced, taken away or put in; sums of one are partial."""
    if call.op.op in ("max", "min") and len(call.inputs) > 1:  # of two tensors
        yield from pointwise(call)
        return
    old, new = len(call.inputs[0]), len(call.outputs[0])
    there = call.dims(max(old, new))
    for k, d in enumerate(d for d in range(max(old, new)) if d not in there):
        yield from _mapped(call, [(d if old >= new else k, d if new >= old else k)])
    if call.op.op in ("sum", "mean"):
        yield from (named(f"d{d}", [d], [PARTIAL]) for d in there)


def attention(call: RuleCall) -> Iterator[Split]:
    """Yield batch, heads and, without a causal flag, the queries of scaled dot-product attention.

    Where ranks outnumber the key-value heads, each takes those of its query heads out of whole ones.
    """
    q, k, _, *masks = call.inputs
    rank = len(q)
    for d in range(rank - 1 if not call.op.argument("is_causal", False) else rank - 2):
        label = {rank - 3: "heads", rank - 2: "queries"}.get(d, f"batch{d}")
        whole = label == "queries" or (label == "heads" and q[d] != k[d] and k[d] % call.ranks != 0)
        if label != "heads" or not whole or call.ranks % k[d] == 0:
            kv = None if whole else d
            yield named(label, [d, kv, kv, *_aligned(masks, q, d)], [d])


def normalized(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions before those that layer_norm and rms_norm normalize."""
    return islice(pointwise(call), len(call.inputs[0]) - len(call.op.argument("normalized_shape")))


def batch_normalized(call: RuleCall) -> Iterator[Split]:
    """Yield channels, and the batch where running statistics are used."""
    rest = [REPLICATED] * (len(call.outputs) - 1)
    yield named("channels", [1, *[0] * (len(call.inputs) - 1)], [1, *rest])
    if not call.op.argument("training", False):
        yield named("batch", [0, *[None] * (len(call.inputs) - 1)], [0, *rest])


def cross_entropy(call: RuleCall) -> Iterator[Split]:
    """Yield rows (partial mean or sum) and the vocabulary of a plain cross-entropy of `(rows, classes)`."""
    plain = len(call.inputs) == 2 and call.op.argument("label_smoothing", 0.0) == 0.0
    if [len(shape) for shape in call.inputs] == [2, 1] and plain:
        yield named("rows", [0, 0], [PARTIAL if call.op.argument("reduction", 1) in (1, 2) else 0])
        yield named("vocabulary", [1, None], [REPLICATED])


def indexed(call: RuleCall) -> Iterator[Split]:
    """Yield the rows taken and the other dimensions, where one dimension is indexed by whole numbers."""
    places = [k for k, one in enumerate(call.op.argument("indices", [])) if isinstance(one, Node)]
    if len(places) == 1 and len(call.inputs) == 2:
        at, taken = places[0], len(call.inputs[1])
        for d in range(len(call.inputs[0])):
            if d != at:
                yield named(f"d{d}", [d, None], [d if d < at else d + taken - 1])
        yield from (named(f"rows{d}", [None, d], [at + d]) for d in range(taken))
        yield named("partial", [PARTIAL, None], [PARTIAL])


def index_selected(call: RuleCall) -> Iterator[Split]:
    """Yield the rows taken and the other dimensions of index_select."""
    for d in range(len(call.inputs[0])):
        yield named(f"d{d}", [None, 0] if d in call.dims() else [d, None], [d])


_FAMILIES: dict[Rule, str] = {
    signed: " ".join(SIGNATURES) + " einsum",
    pointwise: "__and__ __or__ __xor__ where masked_fill dropout expand clone alias detach contiguous "
    "lift_fresh_copy _to_copy to relay zeros_like ones_like full_like empty_like",
    reshaped: "view reshape _unsafe_view flatten unflatten squeeze",
    permuted: "permute transpose t",
    along: "softmax _softmax log_softmax _log_softmax cumsum sort topk slice split split_with_sizes chunk "
    "cat repeat_interleave flip roll logcumsumexp diff glu tril triu pad constant_pad_nd gather scatter "
    "scatter_add",
    around: "sum mean amax amin max min var std var_mean argmax argmin all any prod logsumexp select unbind "
    "unsqueeze stack",
    attention: "scaled_dot_product_attention",
    normalized: "layer_norm rms_norm native_layer_norm",
    batch_normalized: "batch_norm _native_batch_norm_legit_no_training",
    cross_entropy: "cross_entropy_loss",
    indexed: "index",
    index_selected: "index_select",
}
RULES: dict[str, Rule] = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}
CREATORS = kinds(
    "arange full zeros ones empty scalar_tensor new_ones new_zeros new_full linspace eye tril_indices "
    "lift_fresh_copy"
)
"""Operators that make constants: known, whole on every rank."""


def rule_of(op: GraphOperator) -> Rule | None:
    """Return the rule of an operator, None where it is unknown."""
    return RULES.get(op.op) or (pointwise if op.pointwise else None)


def is_known(op: GraphOperator) -> bool:
    """Return whether an operator has named dimensions, or makes a constant."""
    return rule_of(op) is not None or op.op in CREATORS or not op.inputs


def splits(op: GraphOperator, graph: ModuleGraph, ranks: int) -> list[Split]:
    """Return the named dimensions of an operator that `ranks` ranks can share evenly, without "none"."""
    rule = rule_of(op)
    if rule is None or not op.inputs:
        return []
    call = RuleCall(op, graph.shapes(op.inputs), graph.shapes(op.outputs), ranks)
    found = list(rule(call))
    if (
        op.op in PASSING
        and not op.argument("value")
        and (op.op not in ("add", "sub") or len(op.inputs) == 2)
    ):
        found.append(named("partial", [PARTIAL] * len(call.inputs), [PARTIAL] * len(call.outputs)))
    return [split for split in dict.fromkeys(found) if _divides(split, call)]


def _divides(split: Split, call: RuleCall) -> bool:
    """Return whether every split dimension divides evenly, and rows of a table too."""
    states = zip(split.inputs + split.outputs, call.inputs + call.outputs, strict=True)
    sizes = [(shape, int(state[1:])) for state, shape in states if state.startswith("S")]
    return all(d < len(s) and s[d] and s[d] % call.ranks == 0 for s, d in sizes)
