"""Block quantization: what a lossy collective does to the numbers that it carries."""

import torch
from torch import Tensor

from darts_parallel.comm import BLOCK as BLOCK
from darts_parallel.comm import LOSSLESS as LOSSLESS
from darts_parallel.comm import SCALE_BITS as SCALE_BITS
from darts_parallel.comm import transmitted_bits as transmitted_bits


def round_blocks(values: Tensor, bits: int) -> Tensor:
    """Round to `2^bits - 1` levels between minus and plus the largest magnitude of each block.

    Blocks run along the flattened axes after the first.

    Args:
        values: Shape `(ranks, ...)`.
        bits: 2 to 16; 16 returns the values unchanged.

    Returns:
        The values that the receiver sees, shape of `values`; no gradient.
    """
    if bits >= LOSSLESS:
        return values.detach()
    rows = values.detach().reshape(values.shape[0], -1)
    size = rows.shape[1]
    blocks = torch.unflatten(torch.nn.functional.pad(rows, (0, -size % BLOCK)), 1, (-1, BLOCK))
    levels = 2 ** (bits - 1) - 1
    # the smallest normal number keeps an all-zero block from dividing by zero
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny * levels) / levels
    rounded: Tensor = torch.round(blocks / scale) * scale
    return rounded.flatten(1)[:, :size].reshape(values.shape)


def lossy_sum(partials: Tensor, bits: int) -> Tensor:
    """What every rank holds after an all-reduce at `bits`: two roundings, as on a ring.

    The reduce-scatter carries rounded partial sums, the all-gather carries the rounded result. A
    single rank has nothing to send.

    Args:
        partials: One partial sum of each rank, shape `(ranks, ...)`.
        bits: Of both phases.

    Returns:
        Shape `(...)`; no gradient where `bits` is below 16.
    """
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return partials.sum(0)
    return round_blocks(round_blocks(partials, bits).sum(0, keepdim=True), bits).squeeze(0)


def straight_through_sum(partials: Tensor, bits: int) -> Tensor:
    """`lossy_sum` in the forward pass, the exact sum in backward (Bengio et al. 2013)."""
    exact = partials.sum(0)
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return exact
    return exact + (lossy_sum(partials, bits) - exact).detach()
