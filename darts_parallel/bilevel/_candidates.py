"""The part of a layer's strategy that affects the loss: its degrees, and the bits of its two all-reduces."""

from dataclasses import dataclass

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
