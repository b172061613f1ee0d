"""Block quantization: what a lossy collective does to the numbers that it carries."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.cost.collectives import BLOCK as BLOCK
from darts_parallel.cost.collectives import LOSSLESS


@dataclass(frozen=True)
class Rounding:
    """How numbers are rounded to few bits.

    Blocks of 32 to 2048 numbers with a scale of their own are what ZeRO++ sends (Wang et al. 2023, arXiv
    2306.10209); a Hadamard rotation of every block spreads outliers over it (Tseng et al. 2024, arXiv
    2402.04396, use it for weights); stochastic rounding is unbiased (QSGD, Alistarh et al. 2017, arXiv
    1610.02132).
    """

    stochastic: bool = False
    """Round up with the probability of the remainder, from `generator`; else to the nearest level."""
    block: int = BLOCK
    """Numbers that share a scale; a power of two where they are rotated."""
    hadamard: bool = False
    """Rotate every block before it is rounded, and back after it."""
    fp8: bool = False
    """Send 8 bits as floating-point numbers of 4 exponent and 3 mantissa bits (E4M3, Micikevicius et al.
    2022, arXiv 2209.05433), the largest of a block as 448; else as whole multiples of its step."""
    generator: torch.Generator | None = None
    """Source of stochastic rounding."""

    def seeded(self, seed: int) -> "Rounding":
        """Give the rounding a generator of its own where it draws."""
        if not self.stochastic:
            return self
        return replace(self, generator=torch.Generator().manual_seed(seed))


NEAREST = Rounding()
FP8_BITS = 8
LARGEST_FP8 = 448


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's orthogonal and symmetric Hadamard matrix, shape `(size, size)`; size a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    result: Tensor = matrix / size**0.5
    return result


def round_blocks(values: Tensor, bits: int, rounding: Rounding = NEAREST) -> Tensor:
    """Round to `2^bits - 1` levels between minus and plus the largest magnitude of each block.

    Blocks run along the flattened axes after the first.

    Args:
        values: Shape `(ranks, ...)`.
        bits: 2 to 16; 16 returns the values unchanged.
        rounding: Size of a block and how its numbers are rounded.

    Returns:
        The values that the receiver sees, shape of `values`; no gradient.
    """
    if bits >= LOSSLESS:
        return values.detach()
    rows = values.detach().reshape(values.shape[0], -1)
    size, block = rows.shape[1], rounding.block
    blocks = torch.unflatten(torch.nn.functional.pad(rows, (0, -size % block)), 1, (-1, block))
    rotation = hadamard_matrix(block).to(rows.dtype) if rounding.hadamard else None
    if rotation is not None:
        blocks = blocks @ rotation
    floating = rounding.fp8 and bits == FP8_BITS
    levels = LARGEST_FP8 if floating else 2 ** (bits - 1) - 1
    # the smallest normal number keeps an all-zero block from dividing by zero
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny * levels) / levels
    steps = blocks / scale
    if floating:
        rounded = round_e4m3(steps) * scale
    elif rounding.stochastic:
        steps = torch.floor(steps + torch.rand(steps.shape, generator=rounding.generator, dtype=rows.dtype))
        rounded = steps.clamp(-levels, levels) * scale
    else:
        rounded = torch.round(steps) * scale
    if rotation is not None:
        rounded = rounded @ rotation
    result: Tensor = rounded.flatten(1)[:, :size].reshape(values.shape)
    return result


def round_e4m3(values: Tensor) -> Tensor:
    """Numbers of at most 448 as the nearest ones of 4 exponent and 3 mantissa bits, even ones at a tie."""
    exponent = values.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3.0)
    return torch.round(values / step) * step


def lossy_sum(partials: Tensor, bits: int, rounding: Rounding = NEAREST) -> Tensor:
    """What every rank holds after an all-reduce at `bits`: two roundings, as on a ring.

    The reduce-scatter carries rounded partial sums, the all-gather carries the rounded result. A
    single rank has nothing to send.

    Args:
        partials: One partial sum of each rank, shape `(ranks, ...)`.
        bits: Of both phases.
        rounding: How they round.

    Returns:
        Shape `(...)`; no gradient where `bits` is below 16.
    """
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return partials.sum(0)
    reduced = round_blocks(partials, bits, rounding).sum(0, keepdim=True)
    return round_blocks(reduced, bits, rounding).squeeze(0)


def straight_through_sum(partials: Tensor, bits: int, rounding: Rounding = NEAREST) -> Tensor:
    """`lossy_sum` in the forward pass, the exact sum in backward (Bengio et al. 2013)."""
    exact = partials[0] if partials.shape[0] == 1 else partials.sum(0)
    if bits >= LOSSLESS or partials.shape[0] == 1:
        return exact
    return exact + (lossy_sum(partials, bits, rounding) - exact).detach()


Pair = tuple[int, int]
"""A degree of parallelism and the bits of its collective."""


@dataclass
class GradientReducer:
    """The data-parallel all-reduce of one layer, by pairs `(dp, grad_comm_bits)`.

    Attributes:
        rounding: How gradients are rounded.
        residuals: What rounding has kept back so far, by pair: shape `(dp + 1, P)`, the last row the
            owner's. A pair's residuals move on only when it is used.
    """

    rounding: Rounding = NEAREST
    residuals: dict[Pair, Tensor] = field(default_factory=dict)

    def reduce(self, gradients: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """The mean gradient as each pair delivers it; residuals of lossy pairs move on.

        Args:
            gradients: Of the finest data-parallel groups, shape `(G, P)`; the dp of a lossy pair divides G.
            pairs: K degrees and bits.

        Returns:
            Shape `(K, P)`.
        """
        return torch.stack([self._reduce_one(gradients, pair) for pair in pairs])

    def _reduce_one(self, gradients: Tensor, pair: Pair) -> Tensor:
        dp, bits = pair
        if bits >= LOSSLESS or dp == 1:
            return gradients.mean(0)
        ranks = torch.unflatten(gradients, 0, (dp, -1)).mean(1)
        if pair not in self.residuals:
            self.residuals[pair] = torch.zeros(dp + 1, ranks.shape[1])
        kept = self.residuals[pair]
        wanted = ranks + kept[:-1]
        sent = round_blocks(wanted, bits, self.rounding)
        owned = (sent.mean(0) + kept[-1]).unsqueeze(0)
        delivered = round_blocks(owned, bits, self.rounding)
        self.residuals[pair] = torch.cat([wanted - sent, owned - delivered])
        return delivered[0]


def flatten_layer(gradients: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Per-group gradients of one layer side by side: each `(G, ...)`, together `(G, P)`."""
    return torch.cat([gradients[name].flatten(1) for name in names], dim=1)


def unflatten_layer(vector: Tensor, like: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The inverse for one vector of shape `(P,)`; shapes are those of `like`."""
    parts = torch.split(vector, [like[name].numel() for name in names])
    return {name: part.view_as(like[name]) for name, part in zip(names, parts, strict=True)}
