"""A decoder-only Transformer whose blocks run as their tensor-parallel ranks would.

Functional: weights are a dictionary of tensors, so that `torch.func` can batch over data-parallel
groups. Axes: B sequences, T positions, H width, S tensor-parallel ranks, K forward pairs.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from darts_parallel.bilevel._quantize import BLOCK, Pair, lossy_sum, straight_through_sum
from darts_parallel.bilevel.settings import TransformerShape
from darts_parallel.bilevel.space import Candidate
from darts_parallel.cost import LOSSLESS

Weights = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]
"""An all-reduce: partial sums `(S, B, T, H)` to their sum `(B, T, H)`."""
Sums = tuple[int, Reduce]
"""Number of tensor-parallel ranks of a block, and its all-reduce."""
INITIAL_STD = 0.02


def initial_weights(shape: TransformerShape, generator: torch.Generator) -> Weights:
    """Draw weights as GPT-2 does: normal, residual projections smaller by depth."""
    width = shape.width
    residual_std = INITIAL_STD / (2 * shape.num_blocks) ** 0.5

    def normal(std: float, *size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    weights = {"embedding": normal(INITIAL_STD, shape.vocab_size, width)}
    weights["positions"] = normal(INITIAL_STD, shape.context, width)
    for index in range(shape.num_blocks):
        own = {"norm_1": torch.ones(width), "shift_1": torch.zeros(width)}
        own["qkv"] = normal(width**-0.5, width, 3 * width)
        own["out"] = normal(residual_std, shape.num_heads, shape.head_width, width)
        own |= {"norm_2": torch.ones(width), "shift_2": torch.zeros(width)}
        own["up"] = normal(width**-0.5, width, shape.ffn_width)
        own["down"] = normal(residual_std, shape.ffn_width, width)
        weights |= {f"{index}.{name}": weight for name, weight in own.items()}
    head = normal(INITIAL_STD, width, shape.vocab_size)
    return weights | {"norm": torch.ones(width), "shift": torch.zeros(width), "head": head}


def attention_partials(
    weights: Weights,
    index: int,
    state: Tensor,
    ranks: int,
) -> Tensor:
    """Return each rank's partial sum of the attention's output: its heads, its rows of the projection.

    Args:
        state: Normalised input, shape `(B, T, H)`.
        ranks: S, a divisor of the heads.

    Returns:
        Shape `(S, B, T, H)`.
    """
    out = weights[f"{index}.out"]
    heads, head_width = out.shape[0], out.shape[1]
    batch, length, _ = state.shape
    # one product for all ranks: a column-parallel product's columns do not depend on each other
    projected = state @ weights[f"{index}.qkv"]
    by_head = projected.view(batch, length, heads, 3 * head_width).transpose(1, 2)
    query, key, value = by_head.chunk(3, dim=-1)
    future = torch.full((length, length), -torch.inf).triu(1)
    scores = (query * head_width**-0.5) @ key.transpose(-1, -2) + future
    mixed = torch.softmax(scores, -1) @ value
    mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
    return _row_parallel(mixed, out.flatten(0, 1), ranks)


def mlp_partials(
    weights: Weights,
    index: int,
    state: Tensor,
    ranks: int,
) -> Tensor:
    """Return each rank's partial sum of the MLP's output; arguments as `attention_partials`."""
    inner = torch.nn.functional.gelu(state @ weights[f"{index}.up"])
    return _row_parallel(inner, weights[f"{index}.down"], ranks)


def _row_parallel(
    inner: Tensor,
    weight: Tensor,
    ranks: int,
) -> Tensor:
    """Multiply each rank's columns of `inner` `(B, T, F)` by its rows of `weight` `(F, H)`."""
    if ranks == 1:  # one product without a batch axis is a third faster
        return (inner @ weight).unsqueeze(0)
    batch, length, _ = inner.shape
    columns = torch.unflatten(inner.flatten(0, 1), 1, (ranks, -1)).transpose(0, 1)
    partials = columns @ torch.unflatten(weight, 0, (ranks, -1))
    return torch.unflatten(partials, 1, (batch, length))


def block(
    weights: Weights,
    index: int,
    state: Tensor,
    ranks: int,
    reduce: Reduce,
) -> Tensor:
    """Run one pre-norm block with its two all-reduces, shape `(B, T, H)`."""
    normed = _norm(state, weights[f"{index}.norm_1"], weights[f"{index}.shift_1"])
    state = state + reduce(attention_partials(weights, index, normed, ranks))
    normed = _norm(state, weights[f"{index}.norm_2"], weights[f"{index}.shift_2"])
    return state + reduce(mlp_partials(weights, index, normed, ranks))


def candidate_sums(candidate: Candidate, block_size: int = BLOCK) -> Sums:
    """Return how a block sums as one candidate runs it."""
    ranks, bits = candidate.forward_pair
    if bits >= LOSSLESS:
        # exact sums depend on the number of ranks by rounding alone: one product is faster
        ranks = 1
    return ranks, lambda parts: straight_through_sum(parts, bits, block_size)


def mixed_reduce(
    partials: Tensor,
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    block_size: int = BLOCK,
) -> Tensor:
    """Mix several all-reduces of the same partial sums by weights.

    A coarser rank's partial sum is the sum over the finer ranks that it replaces. Backward is
    straight-through for the partial sums and exact for the weights.

    Args:
        partials: Partial sums of the finest division, shape `(S, B, T, H)`.
        pairs: K tensor-parallel degrees and bits.
        pair_weights: Their weights, shape `(K,)`.

    Returns:
        Shape `(B, T, H)`.
    """
    exact = partials.sum(0)
    finest = partials.detach()
    sums = []
    for tp, bits in pairs:
        coarser = torch.unflatten(finest, 0, (tp, -1)).sum(1)
        sums.append(lossy_sum(coarser, bits, block_size))
    mixture = (pair_weights @ torch.stack(sums).flatten(1)).view_as(exact)
    return mixture + exact - exact.detach()


def mixed_sums(
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    block_size: int = BLOCK,
) -> Sums:
    """Return how a block sums as a weighted mixture of pairs.

    Pairs differ only there, and the ranks' products, nearly all of the work, are computed once.
    """
    ranks = max(tp for tp, _ in pairs)
    return ranks, lambda parts: mixed_reduce(parts, pairs, pair_weights, block_size)


def loss_of(
    weights: Weights,
    tokens: Tensor,
    sums: Sequence[Sums],
) -> Tensor:
    """Return the mean next-byte cross-entropy, nats.

    Args:
        tokens: Bytes, shape `(B, T + 1)`.
    """
    blocks = [partial(block, ranks=ranks, reduce=reduce) for ranks, reduce in sums]
    return loss_through(weights, tokens, blocks)


def loss_through(
    weights: Weights,
    tokens: Tensor,
    blocks: Sequence[Callable[..., Tensor]],
) -> Tensor:
    """Return the loss where every block maps weights, its number and a state to the next state."""
    inputs = tokens[:, :-1]
    state = weights["embedding"][inputs] + weights["positions"][: inputs.shape[1]]
    for index, run in enumerate(blocks):
        state = run(weights, index, state)
    scores = _norm(state, weights["norm"], weights["shift"]) @ weights["head"]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def plan_loss(
    weights: Weights,
    tokens: Tensor,
    plan: Sequence[Candidate],
    block_size: int = BLOCK,
) -> Tensor:
    """Return the loss of the model run by one candidate for each block, nats."""
    return loss_of(weights, tokens, [candidate_sums(candidate, block_size) for candidate in plan])


def mixed_loss(
    weights: Weights,
    tokens: Tensor,
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    block_size: int = BLOCK,
) -> Tensor:
    """Return the loss of the mixed model, nats; `pair_weights` has shape `(blocks, K)`."""
    return loss_of(weights, tokens, [mixed_sums(pairs, row, block_size) for row in pair_weights])


def _norm(
    state: Tensor,
    scale: Tensor,
    shift: Tensor,
) -> Tensor:
    return torch.nn.functional.layer_norm(state, scale.shape, scale, shift)
