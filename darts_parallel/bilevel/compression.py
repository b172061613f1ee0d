"""Gradient all-reduce at few bits, with error feedback.

Every rank keeps what rounding took from its gradient and adds it to its next one (Seide et al. 2014,
Interspeech; Karimireddy et al. 2019, arXiv 1901.09847); the owner of the reduced gradient does the
same before the all-gather (as in 1-bit Adam, Tang et al. 2021, arXiv 2102.02888).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.bilevel.quantize import LOSSLESS, round_blocks


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
