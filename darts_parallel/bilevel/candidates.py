"""What a layer may choose from: how it is divided, and the bits of its two all-reduces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.cost.collectives import LOSSLESS
from darts_parallel.errors import ConfigError
from darts_parallel.plan.pins import require_legal_pins
from darts_parallel.plan.space import layer_choices
from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem


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

    @property
    def strategy(self) -> LayerStrategy:
        """The same in a plan's words."""
        return LayerStrategy(
            self.tp, self.dp, tp_comm_bits=self.tp_comm_bits, grad_comm_bits=self.grad_comm_bits
        )

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


def candidate_set(problem: Problem) -> CandidateSet:
    """All candidates of a block: the degrees and bits of the problem's space.

    Errors:
        ConfigError: no degree is legal, or the space has no lossless candidate for the layers around
            the blocks.
    """
    space, devices = problem.config.space, problem.cluster.num_devices
    require_legal_pins(problem)
    for key in ("tp_comm_bits", "grad_comm_bits"):
        pinned = space.pinned(key)
        if pinned is not None and LOSSLESS not in pinned:
            raise ConfigError(
                f"space.{key}={list(pinned)} must hold {LOSSLESS}: layers around the blocks are lossless; "
                f"nearest legal: {[LOSSLESS, *pinned]}."
            )
    found = [Candidate(c.tp, c.dp, c.tp_comm_bits, c.grad_comm_bits) for c in layer_choices(problem, devices)]
    return CandidateSet(tuple(dict.fromkeys(found)))


def _membership(index: Sequence[int], count: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), count).float()
