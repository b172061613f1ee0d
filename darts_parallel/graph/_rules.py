"""Named dimensions of operators: which dimensions of inputs and outputs are one, and may be split together.

A rule yields `Split`s. Splitting one named dimension over a mesh axis gives every tensor of the operator a
*state*, i.e. a placement of the tensor and one of its gradient:

| state | forward | gradient | |
| --- | --- | --- | --- |
| `S0`, `S1`, ... | `Shard(d)` | `Shard(d)` | the tensor has the dimension |
| `R` | `Replicate` | `Replicate` | all ranks do the same |
| `R*` | `Replicate` | `Partial` | the tensor lacks the dimension: each rank adds to its gradient |
| `P` | `Partial` | `Replicate` | the dimension is summed over |

An operator without a rule has no split: it is replicated, and reported.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from darts_parallel.graph.operators import GraphOperator, ModuleGraph, TensorArgument

REPLICATED, VARYING, PARTIAL = "R", "R*", "P"


@dataclass(frozen=True)
class Split:
    """One named dimension of an operator, split over a mesh axis."""

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    group_heads: bool = False
    """Each rank takes the key-value heads of its query heads out of whole ones."""


@dataclass(frozen=True)
class RuleCall:
    """An operator with the shapes of its tensors and the ranks that would share it."""

    op: GraphOperator
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    ranks: int

    def dim(self, name: str, default: int | None, rank: int) -> int | None:
        """Return a dimension, counted from the front."""
        value = self.op.argument(name, default)
        return None if value is None else int(value) % max(rank, 1)


Rule = Callable[[RuleCall], Iterator[Split]]
LINEAR_ALONG = ("repeat_interleave", "slice", "split", "split_with_sizes", "chunk", "cat", "flip", "roll")
"""Operators along a dimension (the first by default) that partial sums go through."""


def shard(dim: int) -> str:
    """Return the state of a tensor that is split in a dimension."""
    return f"S{dim}"


def state_of(dim: int | str | None) -> str:
    """Return the state of a dimension; None: the tensor lacks it."""
    return VARYING if dim is None else shard(dim) if isinstance(dim, int) else dim


def named(
    label: str, inputs: Sequence[int | str | None], outputs: Sequence[int | str | None], **more: bool
) -> Split:
    """Return the split of a named dimension from its place in every tensor."""
    return Split(label, tuple(map(state_of, inputs)), tuple(map(state_of, outputs)), **more)


def _linear_through(call: RuleCall) -> Split:
    """Return the split of a linear operator of one tensor: a partial sum goes through."""
    return Split("partial", (PARTIAL,) * len(call.inputs), (PARTIAL,) * len(call.outputs))


def pointwise(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of the output, as broadcasting aligns the inputs, and sums that go through."""
    out = call.outputs[0]
    for d in range(len(out)):
        places = []
        for shape in call.inputs:
            own = d - (len(out) - len(shape))
            places.append(own if own >= 0 and shape[own] == out[d] else None)
        yield named(f"d{d}", places, [d] * len(call.outputs))
    kind = call.op.op
    tensors = len(call.inputs)
    if kind in ("add", "sub") and tensors == 2:
        yield _linear_through(call)
    elif kind == "mul" or (kind == "div" and not call.op.argument("rounding_mode")):
        for k in range(tensors if kind == "mul" else 1):
            states = tuple(PARTIAL if j == k else VARYING for j in range(tensors))
            yield Split("partial", states, (PARTIAL,))
    elif kind in ("neg", "_to_copy", "clone", "alias") and tensors == 1:
        yield _linear_through(call)


def same_dims(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of a copy."""
    for d in range(len(call.outputs[0])):
        yield named(f"d{d}", [d], [d])
    yield _linear_through(call)


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of dimensions of input and output with equal products."""
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        if i < len(old):
            left.append(i)
            i += 1
        if j < len(new):
            right.append(j)
            j += 1
        while prod(old[k] for k in left) != prod(new[k] for k in right):
            if prod(old[k] for k in left) < prod(new[k] for k in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        yield left, right


def reshaped(call: RuleCall) -> Iterator[Split]:
    """Yield the leading dimension of every group that a view joins or parts."""
    old, new = call.inputs[0], call.outputs[0]
    for left, right in reshape_groups(old, new):
        first = next((k for k in left if old[k] > 1), None)
        second = next((k for k in right if new[k] > 1), None)
        if first is not None and second is not None:
            yield named(f"d{second}", [first], [second])
    yield _linear_through(call)


def _mapped(call: RuleCall, pairs: Sequence[tuple[int, int]]) -> Iterator[Split]:
    """Yield pairs of a dimension of the input and the same one of all outputs."""
    for old, new in pairs:
        yield named(f"d{new}", [old], [new] * len(call.outputs))
    yield _linear_through(call)


def permuted(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions of permute, transpose and t."""
    rank = len(call.inputs[0])
    order = list(range(rank))
    if call.op.op == "permute":
        order = [int(d) % rank for d in call.op.argument("dims")]
    elif rank >= 2:
        a, b = (int(call.op.argument(name, d)) % rank for d, name in enumerate(("dim0", "dim1")))
        order[a], order[b] = order[b], order[a]
    return _mapped(call, [(old, new) for new, old in enumerate(order)])


def unsqueezed(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside the new one."""
    new = call.dim("dim", 0, len(call.outputs[0]))
    assert new is not None
    return _mapped(call, [(d, d + (d >= new)) for d in range(len(call.inputs[0]))])


def expanded(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions that stay, and those that are repeated."""
    old, new = call.inputs[0], call.outputs[0]
    for d in range(len(new)):
        own = d - (len(new) - len(old))
        yield named(f"d{d}", [own if own >= 0 and old[own] == new[d] else None], [d])
    yield _linear_through(call)


def along(call: RuleCall) -> Iterator[Split]:
    """Yield all dimensions but the one that an operator works along, where sizes are equal in all tensors."""
    shape, kind = call.inputs[0], call.op.op
    given = call.op.argument("dims", call.op.argument("dim", 0 if kind in LINEAR_ALONG else -1))
    if given is None:
        return
    whole = {int(d) % max(len(shape), 1) for d in (given if isinstance(given, list) else [given])}
    for d in set(range(len(shape))) - whole:
        if all(len(s) == len(shape) and s[d] == shape[d] for s in call.inputs + call.outputs):
            yield named(f"d{d}", [d] * len(call.inputs), [d] * len(call.outputs))
    if kind in LINEAR_ALONG:
        yield _linear_through(call)


def triangular(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions before a matrix of which a triangle is kept."""
    return _mapped(call, [(d, d) for d in range(len(call.inputs[0]) - 2)])


def padded(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions that padding leaves as they are."""
    for d, size in enumerate(call.inputs[0]):
        if size == call.outputs[0][d]:
            yield named(f"d{d}", [d], [d])
    if not call.op.argument("value"):
        yield _linear_through(call)


def selected(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside the one of which an entry is taken (select, unbind)."""
    gone = call.dim("dim", 0, len(call.inputs[0]))
    assert gone is not None
    return _mapped(call, [(d, d - (d > gone)) for d in range(len(call.inputs[0])) if d != gone])


def stacked(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside the one along which tensors are stacked."""
    new = call.dim("dim", 0, len(call.outputs[0]))
    assert new is not None
    for d in range(len(call.inputs[0])):
        yield named(f"d{d}", [d] * len(call.inputs), [d + (d >= new)])
    yield _linear_through(call)


def reduced(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions that stay; sums and means of a split dimension are partial."""
    shape, kind = call.inputs[0], call.op.op
    if len(call.inputs) > 1:  # the larger or smaller of two tensors
        yield from pointwise(call)
        return
    dims = call.op.argument("dim")
    dims = list(range(len(shape))) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    gone = sorted(int(d) % max(len(shape), 1) for d in dims)
    keep = bool(call.op.argument("keepdim", False))
    for d in range(len(shape)):
        if d not in gone:
            new = d if keep else d - sum(g < d for g in gone)
            yield named(f"d{d}", [d], [new] * len(call.outputs))
        elif kind in ("sum", "mean"):
            yield named(f"d{d}", [d], [PARTIAL])
    if kind in ("sum", "mean"):
        yield _linear_through(call)


def _first(count: int, *places: int | str | None) -> Sequence[int | str | None]:
    return places[:count]


def linear(call: RuleCall) -> Iterator[Split]:
    """Yield rows, columns and the inner dimension of `x @ w.T + b`."""
    x, rank = call.inputs[0], len(call.inputs[0])
    bias = len(call.inputs) > 2
    for d in range(rank - 1):
        yield named(f"rows{d}", [d, None, None][: 2 + bias], [d])
    yield named("columns", [None, 0, 0][: 2 + bias], [rank - 1])
    if x:
        yield named("inner", _first(2 + bias, rank - 1, 1, PARTIAL), [PARTIAL])


def products(call: RuleCall) -> Iterator[Split]:
    """Yield batch, rows, columns and the inner dimension of mm, bmm, matmul."""
    a, b = call.inputs[:2]
    out = len(call.outputs[0])
    if len(a) < 2 or len(b) < 2:
        return
    for d in range(out - 2):
        places = []
        for shape in (a, b):
            own = d - (out - len(shape))
            places.append(own if own >= 0 and shape[own] == call.outputs[0][d] else None)
        yield named(f"batch{d}", places, [d])
    yield named("rows", [len(a) - 2, None], [out - 2])
    yield named("columns", [None, len(b) - 1], [out - 1])
    yield named("inner", [len(a) - 1, len(b) - 2], [PARTIAL])


def added_products(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions of addmm and baddbmm with factors of one."""
    bias, a, b = call.inputs
    if call.op.argument("beta", 1) != 1 or call.op.argument("alpha", 1) != 1:
        return
    out = call.outputs[0]

    def place(d: int) -> int | None:
        own = d - (len(out) - len(bias))
        return own if own >= 0 and bias[own] == out[d] else None

    for d in range(len(out) - 2):
        yield named(f"batch{d}", [place(d), d, d], [d])
    yield named("rows", [place(len(out) - 2), len(a) - 2, None], [len(out) - 2])
    yield named("columns", [place(len(out) - 1), None, len(b) - 1], [len(out) - 1])
    yield named("inner", [PARTIAL, len(a) - 1, len(b) - 2], [PARTIAL])


def attention(call: RuleCall) -> Iterator[Split]:
    """Yield batch, heads and, without a causal flag, the queries of scaled dot-product attention.

    Where ranks outnumber the key-value heads, each takes those of its query heads out of whole ones.
    """
    q, k = call.inputs[0], call.inputs[1]
    rank, masks = len(q), call.inputs[3:]

    def states(d: int, kv: int | None) -> list[int | None]:
        own = [d - (rank - len(mask)) for mask in masks]
        return [d, kv, kv, *(k if k >= 0 and m[k] == q[d] else None for k, m in zip(own, masks, strict=True))]

    for d in range(rank - 2):
        heads = d == rank - 3
        if heads and q[d] != k[d] and k[d] % call.ranks:
            if call.ranks % k[d] == 0:
                yield named("heads", states(d, None), [d], group_heads=True)
            continue
        yield named("heads" if heads else f"batch{d}", states(d, d), [d])
    if not call.op.argument("is_causal", False):
        yield named("queries", states(rank - 2, None), [rank - 2])


def normalized(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions before those that layer_norm and rms_norm normalize."""
    shape = call.inputs[0]
    for d in range(len(shape) - len(call.op.argument("normalized_shape"))):
        yield named(f"d{d}", [d, *[None] * (len(call.inputs) - 1)], [d] * len(call.outputs))


def group_normalized(call: RuleCall) -> Iterator[Split]:
    """Yield batch, and channels where every rank has whole groups."""
    yield named("batch", [0, *[None] * (len(call.inputs) - 1)], [0])
    if int(call.op.argument("num_groups", 1)) % call.ranks == 0:
        yield named("channels", [1, *[0] * (len(call.inputs) - 1)], [1])


def batch_normalized(call: RuleCall) -> Iterator[Split]:
    """Yield channels, and the batch where running statistics are used."""
    rest = [REPLICATED] * (len(call.outputs) - 1)
    yield named("channels", [1, *[0] * (len(call.inputs) - 1)], [1, *rest])
    if not call.op.argument("training", False):
        yield named("batch", [0, *[None] * (len(call.inputs) - 1)], [0, *rest])


def convolution(call: RuleCall) -> Iterator[Split]:
    """Yield batch, output and input channels, and groups of a convolution."""
    bias, groups = len(call.inputs) > 2, int(call.op.argument("groups", 1))
    count = 2 + bias
    yield named("batch", [0, None, None][:count], [0])
    if groups == 1:
        yield named("columns", [None, 0, 0][:count], [1])
        yield named("inner", _first(count, 1, 1, PARTIAL), [PARTIAL])
    elif groups % call.ranks == 0:
        yield named("groups", [1, 0, 0][:count], [1])


def channelwise(call: RuleCall) -> Iterator[Split]:
    """Yield batch and channels of pooling and upsampling."""
    for d in range(min(2, len(call.inputs[0]) - 1)):
        yield named(f"d{d}", [d], [d] * len(call.outputs))


def embedding(call: RuleCall) -> Iterator[Split]:
    """Yield positions, features and, masked and summed, the rows of the table."""
    index = call.inputs[1]
    for d in range(len(index)):
        yield named(f"rows{d}", [None, d], [d])
    yield named("columns", [1, None], [len(index)])
    yield named("vocabulary", [0, None], [PARTIAL])


def cross_entropy(call: RuleCall) -> Iterator[Split]:
    """Yield rows (partial mean or sum) and the vocabulary of a plain cross-entropy of `(rows, classes)`."""
    plain = len(call.inputs) == 2 and call.op.argument("label_smoothing", 0.0) == 0.0
    if len(call.inputs[0]) == 2 and len(call.inputs[1]) == 1 and plain:
        if call.op.argument("reduction", 1) in (1, 2):
            yield named("rows", [0, 0], [PARTIAL])
        else:
            yield named("rows", [0, 0], [0])
        yield named("vocabulary", [1, None], [REPLICATED])


def gathered(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside the one that gather and scatter work along."""
    shape = call.inputs[0]
    whole = call.dim("dim", 0, len(shape))
    for d in range(len(shape)):
        if d != whole and all(len(s) == len(shape) and s[d] == shape[d] for s in call.inputs + call.outputs):
            yield named(f"d{d}", [d] * len(call.inputs), [d])


def indexed(call: RuleCall) -> Iterator[Split]:
    """Yield the rows taken and the other dimensions, where one dimension is indexed by whole numbers."""
    slots = call.op.argument("indices", [])
    places = [k for k, one in enumerate(slots) if isinstance(one, TensorArgument)]
    if len(places) != 1 or len(call.inputs) != 2:
        return
    at, index = places[0], call.inputs[1]
    for d in range(len(call.inputs[0])):
        if d != at:
            yield named(f"d{d}", [d, None], [d if d < at else d + len(index) - 1])
    for d in range(len(index)):
        yield named(f"rows{d}", [None, d], [at + d])
    yield Split("partial", (PARTIAL, VARYING), (PARTIAL,))


def index_selected(call: RuleCall) -> Iterator[Split]:
    """Yield the rows taken and the other dimensions of index_select."""
    at = call.dim("dim", 0, len(call.inputs[0]))
    for d in range(len(call.inputs[0])):
        yield named(f"d{d}", [None if d == at else d, d - d if d == at else None], [d])


def grouped_products(call: RuleCall) -> Iterator[Split]:
    """Yield experts, columns and the inner dimension of products of sorted rows with their own weights.

    Split by experts a rank computes the rows of its own ones and leaves zeros for the others: a partial sum.
    """
    if len(call.inputs) == 3 and len(call.inputs[0]) == 2 and len(call.inputs[1]) == 3:
        yield named("experts", [None, 0, None], [PARTIAL])
        yield named("columns", [None, 2, None], [1])
        yield named("inner", [1, 1, None], [PARTIAL])


def einsum(call: RuleCall) -> Iterator[Split]:
    """Yield every letter of an einsum of distinct letters."""
    left, arrow, right = str(call.op.argument("equation")).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or any(len(set(term)) != len(term) for term in (*terms, right)):
        return
    for letter in sorted(set(left) - {","}):
        out = right.index(letter) if letter in right else PARTIAL
        yield named(letter, [term.index(letter) if letter in term else None for term in terms], [out])


def constant_like(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of a tensor made in the shape of another."""
    if call.inputs and call.inputs[0] == call.outputs[0]:
        for d in range(len(call.outputs[0])):
            yield named(f"d{d}", [d], [d])


_FAMILIES: dict[Rule, str] = {
    pointwise: "__and__ __or__ __xor__ where masked_fill dropout",
    same_dims: "clone alias detach contiguous lift_fresh_copy _to_copy to relay",
    reshaped: "view reshape _unsafe_view flatten unflatten squeeze",
    permuted: "permute transpose t",
    unsqueezed: "unsqueeze",
    expanded: "expand",
    along: "softmax _softmax log_softmax _log_softmax cumsum sort topk slice split split_with_sizes chunk "
    "cat repeat_interleave flip roll logcumsumexp diff glu",
    triangular: "tril triu",
    padded: "pad constant_pad_nd",
    selected: "select unbind",
    stacked: "stack",
    reduced: "sum mean amax amin max min var std var_mean argmax argmin all any prod logsumexp",
    linear: "linear",
    products: "mm bmm matmul",
    added_products: "addmm baddbmm",
    attention: "scaled_dot_product_attention",
    normalized: "layer_norm rms_norm native_layer_norm",
    group_normalized: "group_norm",
    batch_normalized: "batch_norm _native_batch_norm_legit_no_training",
    convolution: "conv1d conv2d conv3d",
    channelwise: "max_pool2d avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d "
    "max_pool1d avg_pool1d adaptive_avg_pool1d max_pool2d_with_indices",
    embedding: "embedding",
    cross_entropy: "cross_entropy_loss",
    gathered: "gather scatter scatter_add",
    indexed: "index",
    index_selected: "index_select",
    grouped_products: "grouped_mm_fallback _grouped_mm grouped_mm",
    einsum: "einsum",
    constant_like: "zeros_like ones_like full_like empty_like",
}
RULES: dict[str, Rule] = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}
CREATORS = ("arange", "full", "zeros", "ones", "empty", "scalar_tensor", "new_ones", "new_zeros", "new_full",
            "linspace", "eye", "tril_indices", "lift_fresh_copy")  # fmt: skip
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
    return [split for split in dict.fromkeys(rule(call)) if _divides(split, call)]


def _divides(split: Split, call: RuleCall) -> bool:
    """Return whether every split dimension divides evenly, and rows of a table too."""
    states = [*zip(split.inputs, call.inputs, strict=True), *zip(split.outputs, call.outputs, strict=True)]
    for state, shape in states:
        if state.startswith("S"):
            d = int(state[1:])
            if d >= len(shape) or shape[d] % call.ranks or shape[d] < call.ranks:
                return False
    return True
