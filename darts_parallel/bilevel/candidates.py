"""What a layer may choose from: how it is divided, and the bits of its two all-reduces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.bilevel.quantize import LOSSLESS
from darts_parallel.bilevel.settings import BilevelSettings


@dataclass(frozen=True, order=True)
class Candidate:
    """One layer's strategy on the virtual devices."""

    tp: int
    dp: int
    tp_comm_bits: int = LOSSLESS
    grad_comm_bits: int = LOSSLESS

    @property
    def lossless(self) -> bool:
        """Training computes what exact parallelism would."""
        return self.tp_comm_bits >= LOSSLESS and self.grad_comm_bits >= LOSSLESS

    def label(self) -> str:
        """Short text for tables, e.g. `tp4 b4 g2`."""
        return f"tp{self.tp} b{self.tp_comm_bits} g{self.grad_comm_bits}"


@dataclass(frozen=True)
class CandidateSet:
    """All candidates of a block and the distinct forward and gradient collectives among them."""

    candidates: tuple[Candidate, ...]

    @cached_property
    def forward_pairs(self) -> tuple[tuple[int, int], ...]:
        """Distinct `(tp, tp_comm_bits)`."""
        return tuple(dict.fromkeys((c.tp, c.tp_comm_bits) for c in self.candidates))

    @cached_property
    def gradient_pairs(self) -> tuple[tuple[int, int], ...]:
        """Distinct `(dp, grad_comm_bits)`."""
        return tuple(dict.fromkeys((c.dp, c.grad_comm_bits) for c in self.candidates))

    @cached_property
    def to_forward(self) -> Tensor:
        """0/1 matrix that sums candidates to forward pairs, shape `(candidates, pairs)`."""
        pairs = self.forward_pairs
        return _membership([pairs.index((c.tp, c.tp_comm_bits)) for c in self.candidates], len(pairs))

    @cached_property
    def to_gradient(self) -> Tensor:
        """The same for gradient pairs."""
        pairs = self.gradient_pairs
        return _membership([pairs.index((c.dp, c.grad_comm_bits)) for c in self.candidates], len(pairs))

    def hard(self, weights: Tensor) -> tuple[Candidate, ...]:
        """One candidate for each row of weights: tp first, then each number of bits given the rest.

        The largest joint weight would favour degrees with few candidates: `tp=1` has no bits to share
        its weight among.

        Args:
            weights: Shape `(rows, candidates)`.
        """
        result = []
        for row in weights.tolist():
            left = list(zip(self.candidates, row, strict=True))
            for key in ("tp", "tp_comm_bits", "grad_comm_bits"):
                totals: dict[int, float] = {}
                for candidate, weight in left:
                    value = getattr(candidate, key)
                    totals[value] = totals.get(value, 0.0) + weight
                best = max(totals, key=lambda value: totals[value])
                left = [(c, w) for c, w in left if getattr(c, key) == best]
            result.append(left[0][0])
        return tuple(result)


def candidate_set(settings: BilevelSettings) -> CandidateSet:
    """All candidates of a block; a group of one rank sends nothing, so its bits are no choice."""
    result = []
    for tp in settings.tp_degrees:
        dp = settings.num_devices // tp
        for tp_bits in settings.tp_bits if tp > 1 else (LOSSLESS,):
            result += [
                Candidate(tp, dp, tp_bits, bits) for bits in (settings.grad_bits if dp > 1 else (LOSSLESS,))
            ]
    return CandidateSet(tuple(result))


def _membership(index: Sequence[int], count: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), count).float()
