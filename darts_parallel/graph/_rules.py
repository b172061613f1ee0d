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

    def dim(self, name: str, rank: int) -> int:
        """Return a dimension, the first by default, counted from the front."""
        return int(self.op.argument(name, 0)) % max(rank, 1)


Rule = Callable[[RuleCall], Iterator[Split]]
LINEAR_ALONG = ("repeat_interleave", "slice", "split", "split_with_sizes", "chunk", "cat", "flip", "roll")
"""Operators along a dimension (the first by default) that partial sums go through."""
_PASSING = (
    "add sub neg clone alias detach contiguous lift_fresh_copy _to_copy to relay view reshape _unsafe_view "
    "flatten unflatten squeeze permute transpose t unsqueeze expand tril triu pad constant_pad_nd select "
    "unbind stack sum mean"
)
PASSING = frozenset((*LINEAR_ALONG, *_PASSING.split()))
"""All linear operators: partial sums of their tensors go through."""
LABELS = {"b": "batch", "c": "columns", "e": "experts", "g": "groups", "k": "inner", "n": "channels",
          "r": "rows", "v": "vocabulary", "B": "batch", "R": "rows"}  # fmt: skip
"""Names of the letters of `SIGNATURES`."""
_POOLS = (
    "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d upsample_nearest2d "
    "upsample_bilinear2d max_pool2d_with_indices"
)
SIGNATURES = {
    "linear": "Rk,ck,+c->Rc",
    **dict.fromkeys(("mm", "bmm", "matmul"), "Brk,Bkc->Brc"),
    **dict.fromkeys(("addmm", "baddbmm"), "+Brc,Brk,Bkc->Brc"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "bkX,ckX,+c->bcX"),
    "grouped convolution": "bgX,gX,g->bgX",
    "group_norm": "bgX,g,g->bgX",
    "embedding": "vc,R->Rc",
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm", "grouped_mm"), "Xk,ekc,X->Xc"),
    **dict.fromkeys(_POOLS.split(), "bnX->bnX"),
}
"""Dimensions of inputs and output, a letter each: `B` and `R` any number of them, aligned at the right, `X`
any number that stay whole; `+`: the tensor is added. What the output lacks is summed over. Of experts (sorted
rows with their own weights) a rank computes the rows of its own ones and leaves zeros for the others."""


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


def _spelled(term: str, rank: int) -> list[str]:
    """Name every dimension of a tensor: those of `Rk` in three dimensions are R2, R1 and k."""
    found = next((c for c in term if c.isupper()), "")
    if not found:
        return list(term)[-rank:] if rank else []
    before, after = term.split(found)
    count = rank - len(before) - len(after)
    return [*before, *(f"{found}{count - d}" for d in range(count)), *after][-rank:]


def signed(call: RuleCall) -> Iterator[Split]:
    """Yield every letter of an operator's signature, or of the equation of an einsum."""
    kind, groups = call.op.op, int(call.op.argument("num_groups", call.op.argument("groups", 1)))
    signature = str(call.op.argument("equation", SIGNATURES.get(kind))).replace(" ", "")
    if kind.startswith("conv") and groups > 1:
        signature = SIGNATURES["grouped convolution"]
    left, arrow, right = signature.partition("->")
    terms, labels = left.split(","), LABELS
    if kind == "einsum":
        labels = {}
        distinct = all(len(set(term)) == len(term) for term in (*terms, right))
        if not arrow or not distinct or not (left.replace(",", "") + right).islower():
            return
    scaled = call.op.argument("beta", 1) != 1 or call.op.argument("alpha", 1) != 1
    ranks = [len(shape) for shape in call.inputs]
    if scaled or (kind == "matmul" and min(ranks) < 2) or ("grouped_mm" in kind and ranks != [2, 3, 1]):
        return
    spelled = [_spelled(t.strip("+"), len(s)) for t, s in zip(terms, call.inputs, strict=False)]
    out = _spelled(right, len(call.outputs[0]))
    for letter in dict.fromkeys([*out, *(one for term in spelled for one in term)]):
        places: list[int | str | None] = []
        sizes = [s[t.index(letter)] for s, t in zip(call.inputs, spelled, strict=True) if letter in t]
        for term, names, shape in zip(terms, spelled, call.inputs, strict=False):
            there = letter in names and (shape[names.index(letter)] > 1 or max(sizes) == 1)
            added = PARTIAL if term.startswith("+") and letter not in out else None
            places.append(names.index(letter) if there else added)
        if not letter.startswith("X") and (labels.get(letter) != "groups" or groups % call.ranks == 0):
            made = out.index(letter) if letter in out else PARTIAL
            number = str(out.index(letter)) if letter[1:] else ""
            yield named(labels.get(letter[0], letter[0]) + number, places, [made] * len(call.outputs))


def pointwise(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of the output, as broadcasting aligns the inputs, and sums that go through."""
    out = call.outputs[0]
    for d in range(len(out)):
        places = []
        for shape in call.inputs:
            own = d - (len(out) - len(shape))
            places.append(own if own >= 0 and shape[own] == out[d] else None)
        yield named(f"d{d}", places, [d] * len(call.outputs))
    kind, tensors = call.op.op, len(call.inputs)
    if kind == "mul" or (kind == "div" and not call.op.argument("rounding_mode")):
        for k in range(tensors if kind == "mul" else 1):
            states = tuple(PARTIAL if j == k else VARYING for j in range(tensors))
            yield Split("partial", states, (PARTIAL,))


def same_dims(call: RuleCall) -> Iterator[Split]:
    """Yield every dimension of a copy, or of a tensor made in the shape of another."""
    if call.inputs[0] == call.outputs[0]:
        yield from _mapped(call, [(d, d) for d in range(len(call.outputs[0]))])


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


def _mapped(call: RuleCall, pairs: Sequence[tuple[int, int]]) -> Iterator[Split]:
    """Yield pairs of a dimension of all inputs and the same one of all outputs."""
    for old, new in pairs:
        yield named(f"d{new}", [old] * len(call.inputs), [new] * len(call.outputs))


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
    """Yield the dimensions beside the new one, along which tensors may be stacked."""
    new = call.dim("dim", len(call.outputs[0]))
    return _mapped(call, [(d, d + (d >= new)) for d in range(len(call.inputs[0]))])


def along(call: RuleCall) -> Iterator[Split]:
    """Yield all dimensions but those that an operator works along, where sizes are equal in all tensors."""
    shape, kind = call.inputs[0], call.op.op
    given = call.op.argument("dims", call.op.argument("dim", 0 if kind in LINEAR_ALONG else -1))
    given = (-1, -2) if kind in ("tril", "triu") else () if kind in ("pad", "constant_pad_nd") else given
    if given is None:
        return
    whole = {int(d) % max(len(shape), 1) for d in (given if isinstance(given, (list, tuple)) else [given])}
    tensors = call.inputs + call.outputs
    free = [d for d in range(len(shape)) if d not in whole]
    yield from _mapped(
        call, [(d, d) for d in free if all(len(s) == len(shape) and s[d] == shape[d] for s in tensors)]
    )


def selected(call: RuleCall) -> Iterator[Split]:
    """Yield the dimensions beside the one of which an entry is taken (select, unbind)."""
    gone = call.dim("dim", len(call.inputs[0]))
    return _mapped(call, [(d, d - (d > gone)) for d in range(len(call.inputs[0])) if d != gone])


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


def batch_normalized(call: RuleCall) -> Iterator[Split]:
    """Yield channels, and the batch where running statistics are used."""
    rest = [REPLICATED] * (len(call.outputs) - 1)
    yield named("channels", [1, *[0] * (len(call.inputs) - 1)], [1, *rest])
    if not call.op.argument("training", False):
        yield named("batch", [0, *[None] * (len(call.inputs) - 1)], [0, *rest])


def cross_entropy(call: RuleCall) -> Iterator[Split]:
    """Yield rows (partial mean or sum) and the vocabulary of a plain cross-entropy of `(rows, classes)`."""
    plain = len(call.inputs) == 2 and call.op.argument("label_smoothing", 0.0) == 0.0
    if len(call.inputs[0]) == 2 and len(call.inputs[1]) == 1 and plain:
        if call.op.argument("reduction", 1) in (1, 2):
            yield named("rows", [0, 0], [PARTIAL])
        else:
            yield named("rows", [0, 0], [0])
        yield named("vocabulary", [1, None], [REPLICATED])


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
    at = call.dim("dim", len(call.inputs[0]))
    for d in range(len(call.inputs[0])):
        yield named(f"d{d}", [None if d == at else d, d - d if d == at else None], [d])


_FAMILIES: dict[Rule, str] = {
    signed: " ".join(name for name in SIGNATURES if " " not in name) + " einsum",
    pointwise: "__and__ __or__ __xor__ where masked_fill dropout expand",
    same_dims: "clone alias detach contiguous lift_fresh_copy _to_copy to relay zeros_like ones_like "
    "full_like empty_like",
    reshaped: "view reshape _unsafe_view flatten unflatten squeeze",
    permuted: "permute transpose t",
    unsqueezed: "unsqueeze stack",
    along: "softmax _softmax log_softmax _log_softmax cumsum sort topk slice split split_with_sizes chunk "
    "cat repeat_interleave flip roll logcumsumexp diff glu tril triu pad constant_pad_nd gather scatter "
    "scatter_add",
    selected: "select unbind",
    reduced: "sum mean amax amin max min var std var_mean argmax argmin all any prod logsumexp",
    attention: "scaled_dot_product_attention",
    normalized: "layer_norm rms_norm native_layer_norm",
    batch_normalized: "batch_norm _native_batch_norm_legit_no_training",
    cross_entropy: "cross_entropy_loss",
    indexed: "index",
    index_selected: "index_select",
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
    found = list(rule(call))
    if op.op in PASSING and not op.argument("value") and (op.op not in ("add", "sub") or len(op.inputs) == 2):
        found.append(Split("partial", (PARTIAL,) * len(call.inputs), (PARTIAL,) * len(call.outputs)))
    return [split for split in dict.fromkeys(found) if _divides(split, call)]


def _divides(split: Split, call: RuleCall) -> bool:
    """Return whether every split dimension divides evenly, and rows of a table too."""
    states = [*zip(split.inputs, call.inputs, strict=True), *zip(split.outputs, call.outputs, strict=True)]
    for state, shape in states:
        if state.startswith("S"):
            d = int(state[1:])
            if d >= len(shape) or shape[d] % call.ranks or shape[d] < call.ranks:
                return False
    return True
