"""A decoder-only Transformer whose blocks run as their tensor-parallel ranks would.

Functional: weights are a dictionary of tensors, so that `torch.func` can batch over data-parallel
groups. Axes: B sequences, T positions, H width, S tensor-parallel ranks, K forward pairs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.quantize import NEAREST, Pair, Rounding, lossy_sum, straight_through_sum
from darts_parallel.bilevel.settings import TransformerShape
from darts_parallel.cost.collectives import LOSSLESS

Weights = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]
"""An all-reduce: partial sums `(S, B, T, H)` to their sum `(B, T, H)`."""
INITIAL_STD = 0.02


def initial_weights(shape: TransformerShape, generator: torch.Generator) -> Weights:
    """Random weights as GPT-2 draws them: normal, residual projections smaller by depth."""
    h, residual_std = shape.width, INITIAL_STD / (2 * shape.num_blocks) ** 0.5

    def normal(std: float, *size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    weights = {
        "embedding": normal(INITIAL_STD, shape.vocab_size, h),
        "positions": normal(INITIAL_STD, shape.context, h),
    }
    for index in range(shape.num_blocks):
        weights |= {
            f"{index}.norm_1": torch.ones(h),
            f"{index}.shift_1": torch.zeros(h),
            f"{index}.qkv": normal(h**-0.5, h, 3 * h),
            f"{index}.out": normal(residual_std, shape.num_heads, shape.head_width, h),
            f"{index}.norm_2": torch.ones(h),
            f"{index}.shift_2": torch.zeros(h),
            f"{index}.up": normal(h**-0.5, h, shape.ffn_width),
            f"{index}.down": normal(residual_std, shape.ffn_width, h),
        }
    return weights | {
        "norm": torch.ones(h),
        "shift": torch.zeros(h),
        "head": normal(INITIAL_STD, h, shape.vocab_size),
    }


def attention_partials(weights: Weights, index: int, state: Tensor, ranks: int) -> Tensor:
    """Each rank's partial sum of the attention's output: its heads, its rows of the projection.

    Args:
        weights: Of the whole model.
        index: Of the block.
        state: Normalised input, shape `(B, T, H)`.
        ranks: S, a divisor of the heads.

    Returns:
        Shape `(S, B, T, H)`.
    """
    out = weights[f"{index}.out"]
    heads, head_width = out.shape[0], out.shape[1]
    batch, length, _ = state.shape
    # one product for all ranks: a column-parallel product's columns do not depend on each other
    projected = (state @ weights[f"{index}.qkv"]).view(batch, length, heads, 3 * head_width).transpose(1, 2)
    q, k, v = projected.chunk(3, dim=-1)
    future = torch.full((length, length), -torch.inf).triu(1)
    mixed = torch.softmax((q * head_width**-0.5) @ k.transpose(-1, -2) + future, -1) @ v
    return _row_parallel(mixed.transpose(1, 2).reshape(batch, length, -1), out.flatten(0, 1), ranks)


def mlp_partials(weights: Weights, index: int, state: Tensor, ranks: int) -> Tensor:
    """Each rank's partial sum of the MLP's output; arguments as `attention_partials`."""
    inner = torch.nn.functional.gelu(state @ weights[f"{index}.up"])
    return _row_parallel(inner, weights[f"{index}.down"], ranks)


def _row_parallel(inner: Tensor, weight: Tensor, ranks: int) -> Tensor:
    """Each rank's product of its columns of `inner` `(B, T, F)` and its rows of `weight` `(F, H)`."""
    if ranks == 1:  # one product without a batch axis is a third faster
        return (inner @ weight).unsqueeze(0)
    batch, length, _ = inner.shape
    rows = torch.unflatten(inner.flatten(0, 1), 1, (ranks, -1)).transpose(0, 1)
    return torch.unflatten(rows @ torch.unflatten(weight, 0, (ranks, -1)), 1, (batch, length))


def block(weights: Weights, index: int, state: Tensor, ranks: int, reduce: Reduce) -> Tensor:
    """One pre-norm block with its two all-reduces, shape `(B, T, H)`."""
    normed = _norm(state, weights[f"{index}.norm_1"], weights[f"{index}.shift_1"])
    state = state + reduce(attention_partials(weights, index, normed, ranks))
    normed = _norm(state, weights[f"{index}.norm_2"], weights[f"{index}.shift_2"])
    return state + reduce(mlp_partials(weights, index, normed, ranks))


def candidate_block(
    weights: Weights, index: int, state: Tensor, candidate: Candidate, rounding: Rounding = NEAREST
) -> Tensor:
    """The block as one candidate runs it, shape `(B, T, H)`."""
    ranks, bits = candidate.forward_pair
    # exact sums do not depend on how many ranks they come from but for rounding: one product is faster
    ranks = ranks if bits < LOSSLESS else 1
    return block(weights, index, state, ranks, lambda parts: straight_through_sum(parts, bits, rounding))


def mixed_reduce(
    partials: Tensor, pairs: Sequence[Pair], pair_weights: Tensor, rounding: Rounding = NEAREST
) -> Tensor:
    """The weighted mixture of several all-reduces of the same partial sums.

    A coarser rank's partial sum is the sum over the finer ranks that it replaces. Backward is
    straight-through for the partial sums and exact for the weights.

    Args:
        partials: Of the finest division, shape `(S, B, T, H)`.
        pairs: K tensor-parallel degrees and bits.
        pair_weights: Their weights, shape `(K,)`.
        rounding: How few bits round.

    Returns:
        Shape `(B, T, H)`.
    """
    held = partials.detach()
    exact = partials.sum(0)
    sums = torch.stack([
        lossy_sum(torch.unflatten(held, 0, (tp, -1)).sum(1), bits, rounding)
        if bits < LOSSLESS else exact.detach()
        for tp, bits in pairs
    ])  # fmt: skip
    mixture = (pair_weights @ sums.flatten(1)).view_as(exact)
    return mixture + exact - exact.detach()


def mixed_block(
    weights: Weights,
    index: int,
    state: Tensor,
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    mix: str,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """The block as the weighted mixture of ways to sum, shape `(B, T, H)`.

    Args:
        weights: Of the whole model.
        index: Of the block.
        state: Shape `(B, T, H)`.
        pairs: K tensor-parallel degrees and bits.
        pair_weights: Their weights, shape `(K,)`, summing to 1.
        mix: `block` runs every pair from end to end and mixes the outputs. `collective` mixes
            at each of the two all-reduces: pairs differ only there, and the ranks' products,
            nearly all of the work, are computed once.
        rounding: How few bits round.
    """
    if mix == "collective":
        ranks = max(tp for tp, _ in pairs)
        return block(
            weights, index, state, ranks, lambda parts: mixed_reduce(parts, pairs, pair_weights, rounding)
        )
    outputs = [
        candidate_block(weights, index, state, Candidate(tp, 1, tp_comm_bits=bits), rounding)
        for tp, bits in pairs
    ]
    return (pair_weights.view(-1, 1, 1, 1) * torch.stack(outputs)).sum(0)


def embed(weights: Weights, tokens: Tensor) -> Tensor:
    """State before the first block, shape `(B, T, H)`, of tokens `(B, T + 1)`."""
    inputs = tokens[:, :-1]
    return weights["embedding"][inputs] + weights["positions"][: inputs.shape[1]]


def loss_from(weights: Weights, tokens: Tensor, state: Tensor) -> Tensor:
    """Mean next-byte cross-entropy, nats, of the state after the last block, `(B, T, H)`."""
    scores = _norm(state, weights["norm"], weights["shift"]) @ weights["head"]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(weights: Weights, tokens: Tensor, blocks: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Mean next-byte cross-entropy, nats.

    Args:
        weights: Of the whole model.
        tokens: Shape `(B, T + 1)`.
        blocks: The model's blocks in order, each from state to state.
    """
    state = embed(weights, tokens)
    for apply in blocks:
        state = apply(state)
    return loss_from(weights, tokens, state)


def plan_loss(
    weights: Weights, tokens: Tensor, plan: Sequence[Candidate], rounding: Rounding = NEAREST
) -> Tensor:
    """Loss of the model run by one candidate for each block, nats."""
    return loss_of(weights, tokens, [
        lambda state, index=index, candidate=candidate: candidate_block(  # type: ignore[misc]
            weights, index, state, candidate, rounding
        )
        for index, candidate in enumerate(plan)
    ])  # fmt: skip


def mixed_loss(
    weights: Weights,
    tokens: Tensor,
    pairs: Sequence[Pair],
    pair_weights: Tensor,
    mix: str,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """Loss of the mixed model, nats; `pair_weights` has shape `(blocks, K)`."""
    return loss_of(weights, tokens, [
        lambda state, index=index: mixed_block(  # type: ignore[misc]
            weights, index, state, pairs, pair_weights[index], mix, rounding
        )
        for index in range(len(pair_weights))
    ])  # fmt: skip


def _norm(state: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(state, scale.shape, scale, shift)
