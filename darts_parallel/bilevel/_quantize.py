"""Block quantization: what a lossy collective does to the numbers that it carries."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.config import LOSSLESS
from darts_parallel.cost import BLOCK as BLOCK
from darts_parallel.cost import Tensors


def round_blocks(
    values: Tensor,
    bits: int,
    block_size: int = BLOCK,
) -> Tensor:
    """Round to `2^bits - 1` levels between minus and plus the largest magnitude of each block.

    Blocks of 32 to 2048 numbers with a scale of their own are what ZeRO++ sends (Wang et al. 2023, arXiv
    2306.10209). They run along the flattened axes after the first.

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
    blocks = torch.unflatten(
        torch.nn.functional.pad(rows, (0, -size % block_size)), 1, (-1, block_size)
    )
    levels = 2 ** (bits - 1) - 1
    # the smallest normal number keeps an all-zero block from dividing by zero
    scale = (
        blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny * levels)
        / levels
    )
    rounded = torch.round(blocks / scale) * scale
    return rounded.flatten(1)[:, :size].reshape(values.shape)


def lossy_sum(
    partials: Tensor,
    bits: int,
    block_size: int = BLOCK,
) -> Tensor:
    """Return the sum that every rank has after an all-reduce at `bits`: two roundings, as on a ring.

    The reduce-scatter carries rounded partial sums, the all-gather carries the rounded result. A
    single rank has nothing to send.

    Args:
        partials: One partial sum of each rank, shape `(ranks, ...)`.
        bits: Bits of both phases.

    Returns:
        Shape `(...)`; no gradient where `bits` is below 16.
    """
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return partials.sum(0)
    reduced = round_blocks(partials, bits, block_size).sum(0, keepdim=True)
    return round_blocks(reduced, bits, block_size).squeeze(0)


def straight_through_sum(
    partials: Tensor,
    bits: int,
    block_size: int = BLOCK,
) -> Tensor:
    """Take `lossy_sum` in the forward pass, the exact sum in backward (Bengio et al. 2013)."""
    exact = partials.sum(0)
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return exact
    return exact + (lossy_sum(partials, bits, block_size) - exact).detach()


Pair = tuple[int, int]
"""A degree of parallelism and the bits of its collective."""


@dataclass
class GradientReducer:
    """The data-parallel all-reduce of one layer, by pairs `(dp, grad_comm_bits)`.

    Attributes:
        block_size: Numbers that share a scale.
        residuals: What rounding has kept back so far, by pair: shape `(dp + 1, P)`, the last row the
            owner's. A pair's residuals move on only when it is used.
    """

    block_size: int = BLOCK
    residuals: dict[Pair, Tensor] = field(default_factory=dict)

    def reduce(
        self,
        gradients: Tensor,
        pairs: Sequence[Pair],
    ) -> Tensor:
        """Return the mean gradient as each pair delivers it; residuals of lossy pairs move on.

        Args:
            gradients: Gradients of the finest data-parallel groups, shape `(G, P)`; the dp of every lossy
                pair divides G.
            pairs: K degrees and bits.

        Returns:
            Shape `(K, P)`.
        """
        means = []
        for pair in pairs:
            dp, bits = pair
            if bits >= LOSSLESS or dp == 1:
                means.append(gradients.mean(0))
                continue
            ranks = torch.unflatten(gradients, 0, (dp, -1)).mean(1)
            if pair not in self.residuals:
                self.residuals[pair] = torch.zeros(dp + 1, ranks.shape[1])
            residual = self.residuals[pair]
            wanted = ranks + residual[:-1]
            sent = round_blocks(wanted, bits, self.block_size)
            owned = (sent.mean(0) + residual[-1]).unsqueeze(0)
            delivered = round_blocks(owned, bits, self.block_size)
            self.residuals[pair] = torch.cat([wanted - sent, owned - delivered])
            means.append(delivered[0])
        return torch.stack(means)


def flatten_layer(gradients: Tensors, names: Sequence[str]) -> Tensor:
    """Put per-group gradients of one layer side by side: each `(G, ...)`, together `(G, P)`."""
    return torch.cat([gradients[name].flatten(1) for name in names], dim=1)


def unflatten_layer(
    vector: Tensor,
    like: Tensors,
    names: Sequence[str],
) -> Tensors:
    """Invert `flatten_layer` for one vector of shape `(P,)`; shapes are those of `like`."""
    parts = torch.split(vector, [like[name].numel() for name in names])
    return {name: part.view_as(like[name]) for name, part in zip(names, parts, strict=True)}
