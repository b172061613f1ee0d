"""Block quantization: what a lossy collective does to the numbers that it carries."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.cost.collectives import BLOCK as BLOCK
from darts_parallel.cost.collectives import LOSSLESS


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


@dataclass
class GradientReducer:
    """The data-parallel all-reduce of one layer, for each of K pairs `(dp, grad_comm_bits)`.

    Attributes:
        pairs: Degrees and bits.
        residuals: What rounding has kept back so far, by pair: shape `(dp + 1, P)`, the last row the
            owner's. Every pair's residuals evolve as if that pair alone were used.
    """

    pairs: tuple[tuple[int, int], ...]
    residuals: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def reduce(self, gradients: Tensor) -> Tensor:
        """The mean gradient as each pair delivers it; residuals move on.

        Args:
            gradients: Of the finest data-parallel groups, shape `(G, P)`; every dp divides G.

        Returns:
            Shape `(K, P)`.
        """
        return torch.stack([self._reduce_one(gradients, pair) for pair in self.pairs])

    def _reduce_one(self, gradients: Tensor, pair: tuple[int, int]) -> Tensor:
        dp, bits = pair
        ranks = torch.unflatten(gradients, 0, (dp, -1)).mean(1)
        if bits >= LOSSLESS or dp == 1:
            return ranks.mean(0)
        if pair not in self.residuals:
            self.residuals[pair] = torch.zeros(dp + 1, ranks.shape[1])
        kept = self.residuals[pair]
        wanted = ranks + kept[:-1]
        sent = round_blocks(wanted, bits)
        owned = (sent.mean(0) + kept[-1]).unsqueeze(0)
        delivered = round_blocks(owned, bits)
        self.residuals[pair] = torch.cat([wanted - sent, owned - delivered])
        return delivered[0]


def flatten_layer(gradients: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Per-group gradients of one layer side by side: each `(G, ...)`, together `(G, P)`."""
    return torch.cat([gradients[name].flatten(1) for name in names], dim=1)


def unflatten_layer(vector: Tensor, like: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The inverse for one vector of shape `(P,)`; shapes are those of `like`."""
    parts = torch.split(vector, [like[name].numel() for name in names])
    return {name: part.view_as(like[name]) for name, part in zip(names, parts, strict=True)}
