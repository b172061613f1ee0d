"""The part of a plan that affects the loss, and its price in steps: log steps relative to 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.bilevel._quantize import Pair
from darts_parallel.cost import LOSSLESS
from darts_parallel.plan import LayerStrategy


@dataclass(frozen=True, order=True)
class Candidate:
    """One block's strategy without ZeRO, recomputation and stages, which change no loss."""

    tp: int
    dp: int
    tp_comm_bits: int = LOSSLESS
    grad_comm_bits: int = LOSSLESS

    @staticmethod
    def of(strategy: LayerStrategy) -> "Candidate":
        """Keep what affects the loss."""
        return Candidate(strategy.tp, strategy.dp, strategy.tp_comm_bits, strategy.grad_comm_bits)

    @property
    def forward_pair(self) -> Pair:
        """Tensor-parallel degree and bits of the sums; a group of one rank sends nothing."""
        return self.tp, self.tp_comm_bits if self.tp > 1 else LOSSLESS

    @property
    def gradient_pair(self) -> Pair:
        """Data-parallel degree and bits of the gradients."""
        return self.dp, self.grad_comm_bits if self.dp > 1 else LOSSLESS

    @property
    def lossless(self) -> bool:
        """Whether training computes what exact parallelism would."""
        return self.forward_pair[1] >= LOSSLESS and self.gradient_pair[1] >= LOSSLESS

    def label(self) -> str:
        """Write it in short for tables, e.g. `tp4 dp2 b4 g2`."""
        return f"tp{self.tp} dp{self.dp} b{self.forward_pair[1]} g{self.gradient_pair[1]}"

    def training_key(self) -> str:
        """Name the part that affects the loss: plans of equal names train equally."""
        sums = f"tp{self.tp} b{self.tp_comm_bits}" if self.forward_pair[1] < LOSSLESS else "exact sums"
        sent = (
            f"dp{self.dp} g{self.grad_comm_bits}" if self.gradient_pair[1] < LOSSLESS else "exact gradients"
        )
        return f"{sums}, {sent}"


EXACT = Candidate(1, 1)
"""A block that trains as every plan without lossy collectives does, whatever its degrees."""


@dataclass(frozen=True)
class LogSlowdown:
    """An additive estimate of `log(steps to target)`, up to a constant that all plans share.

    Attributes:
        forward_pairs: Tensor-parallel degrees with the bits of their sums, Kf of them.
        gradient_pairs: Data-parallel degrees with the bits of their gradients, Kg of them.
        forward: Log slowdown by every block's sums, shape `(blocks, Kf)`, float64.
        gradient: Log slowdown by every block's gradients, shape `(blocks, Kg)`, float64.
        by_batch: Log slowdown by every global batch size, `log(1 + B_noise / B)`.
    """

    forward_pairs: tuple[Pair, ...]
    gradient_pairs: tuple[Pair, ...]
    forward: Tensor
    gradient: Tensor
    by_batch: dict[int, float]

    @staticmethod
    def zero(
        forward: Sequence[Pair], gradient: Sequence[Pair], blocks: int, batches: Sequence[int]
    ) -> "LogSlowdown":
        """Begin with prices of 0."""
        sums, sent = (torch.zeros(blocks, len(pairs), dtype=torch.float64) for pairs in (forward, gradient))
        return LogSlowdown(tuple(forward), tuple(gradient), sums, sent, dict.fromkeys(batches, 0.0))

    def of_plan(self, blocks: Sequence[Candidate], batch: int) -> float:
        """Price a hard plan: one candidate for each block, and a global batch size."""
        sums = [self.forward_pairs.index(block.forward_pair) for block in blocks]
        sent = [self.gradient_pairs.index(block.gradient_pair) for block in blocks]
        rows = range(len(blocks))
        return float(self.forward[rows, sums].sum() + self.gradient[rows, sent].sum()) + self.by_batch[batch]

    def nonnegative(self) -> tuple["LogSlowdown", float]:
        """Put each block's cheapest pair at 0; also return what was taken from every plan alike."""
        least = [part.amin(1, keepdim=True) for part in (self.forward, self.gradient)]
        shifted = replace(self, forward=self.forward - least[0], gradient=self.gradient - least[1])
        return shifted, float(least[0].sum() + least[1].sum())

    def on_choices(self, choices: Sequence[LayerStrategy], layers: int, first_block: int) -> Tensor:
        """Price every layer under every strategy of a table, shape `(layers, C)`.

        Args:
            choices: C strategies.
            layers: Number of layers of the table; those around the blocks travel at 16 bits and cost nothing.
            first_block: Layer of the first block.
        """
        candidates = [Candidate.of(choice) for choice in choices]
        sums = torch.tensor([self.forward_pairs.index(c.forward_pair) for c in candidates])
        sent = torch.tensor([self.gradient_pairs.index(c.gradient_pair) for c in candidates])
        result = torch.zeros(layers, len(candidates), dtype=torch.float64)
        result[first_block : first_block + len(self.forward)] = self.forward[:, sums] + self.gradient[:, sent]
        return result
