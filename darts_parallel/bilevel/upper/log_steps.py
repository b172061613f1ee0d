"""What a plan costs in steps: logarithms of steps to the target, by block and lossy collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.quantize import Pair
from darts_parallel.plan.strategy import LayerStrategy


@dataclass(frozen=True)
class LogSteps:
    """An additive estimate of `log(steps to target)`, up to what all plans share.

    Attributes:
        forward_pairs: Tensor-parallel degrees with the bits of their sums, Kf of them.
        gradient_pairs: Data-parallel degrees with the bits of their gradients, Kg of them.
        forward: Log steps of every block's sums, shape `(blocks, Kf)`, float64.
        gradient: Log steps of every block's gradients, shape `(blocks, Kg)`.
        by_batch: Log steps of every global batch size, `log(1 + B_noise / B)`.
        by_way: Log steps of asynchronous pipeline schedules; others cost none.
    """

    forward_pairs: tuple[Pair, ...]
    gradient_pairs: tuple[Pair, ...]
    forward: Tensor
    gradient: Tensor
    by_batch: dict[int, float]
    by_way: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def zero(
        forward: Sequence[Pair], gradient: Sequence[Pair], blocks: int, batches: Sequence[int]
    ) -> "LogSteps":
        """Nothing is known to cost steps."""
        sums, sent = (torch.zeros(blocks, len(pairs), dtype=torch.float64) for pairs in (forward, gradient))
        return LogSteps(tuple(forward), tuple(gradient), sums, sent, dict.fromkeys(batches, 0.0))

    def of_outer(self, batch: int, way: str) -> float:
        """Log steps of a global batch size and a pipeline schedule."""
        return self.by_batch[batch] + self.by_way.get(way, 0.0)

    def of_plan(self, blocks: Sequence[Candidate], batch: int, way: str = "") -> float:
        """Log steps of a hard plan.

        Args:
            blocks: One candidate for each block.
            batch: Global batch size.
            way: Pipeline schedule.
        """
        sums = [
            float(self.forward[i, self.forward_pairs.index(c.forward_pair)]) for i, c in enumerate(blocks)
        ]
        sent = [
            float(self.gradient[i, self.gradient_pairs.index(c.gradient_pair)]) for i, c in enumerate(blocks)
        ]
        return sum(sums) + sum(sent) + self.of_outer(batch, way)

    def nonnegative(self) -> tuple["LogSteps", float]:
        """Put each block's cheapest pair at 0; also returns what was taken from every plan alike."""
        least = [part.amin(1, keepdim=True) for part in (self.forward, self.gradient)]
        shifted = replace(self, forward=self.forward - least[0], gradient=self.gradient - least[1])
        return shifted, float(least[0].sum() + least[1].sum())

    def on_choices(self, choices: Sequence[LayerStrategy], layers: int, first_block: int) -> Tensor:
        """Log steps of every layer under every strategy of a table, shape `(layers, C)`.

        Args:
            choices: C strategies.
            layers: Of the table; those around the blocks travel at 16 bits and cost nothing.
            first_block: Layer of the first block.
        """
        known = [Candidate.of(choice) for choice in choices]
        sums = torch.tensor([self.forward_pairs.index(c.forward_pair) for c in known])
        sent = torch.tensor([self.gradient_pairs.index(c.gradient_pair) for c in known])
        result = torch.zeros(layers, len(known), dtype=torch.float64)
        count = len(self.forward)
        result[first_block : first_block + count] = self.forward[:, sums] + self.gradient[:, sent]
        return result
