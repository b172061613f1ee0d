"""What of a layer's strategy training can feel: its degrees, and the bits of its two all-reduces."""

from collections.abc import Sequence
from dataclasses import dataclass

from darts_parallel.bilevel.quantize import Pair
from darts_parallel.cost.collectives import LOSSLESS
from darts_parallel.plan.strategy import LayerStrategy


@dataclass(frozen=True, order=True)
class Candidate:
    """One block's strategy as training feels it; ZeRO, recomputation and stages change no loss."""

    tp: int
    dp: int
    tp_comm_bits: int = LOSSLESS
    grad_comm_bits: int = LOSSLESS

    @staticmethod
    def of(strategy: LayerStrategy) -> "Candidate":
        """What training feels of a strategy."""
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
        """Training computes what exact parallelism would."""
        return self.forward_pair[1] >= LOSSLESS and self.gradient_pair[1] >= LOSSLESS

    def label(self) -> str:
        """Short text for tables, e.g. `tp4 dp2 b4 g2`."""
        return f"tp{self.tp} dp{self.dp} b{self.forward_pair[1]} g{self.gradient_pair[1]}"

    def felt(self) -> str:
        """Name the candidate by what training feels: plans of equal names train equally."""
        sums = f"tp{self.tp} b{self.tp_comm_bits}" if self.forward_pair[1] < LOSSLESS else "exact sums"
        sent = (
            f"dp{self.dp} g{self.grad_comm_bits}" if self.gradient_pair[1] < LOSSLESS else "exact gradients"
        )
        return f"{sums}, {sent}"


def plan_words(blocks: Sequence[Candidate]) -> str:
    """The bits of all blocks in a few words, e.g. `sums 16 16 4 4, gradients 2 2 2 2`."""
    sums = " ".join(str(c.forward_pair[1]) for c in blocks)
    sent = " ".join(str(c.gradient_pair[1]) for c in blocks)
    return f"sums {sums}, gradients {sent}"
