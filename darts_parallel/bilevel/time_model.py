"""Seconds per step of the virtual devices, differentiable in the candidates' weights.

They are read from the package's own cost table, which knows the bits of a strategy's collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate, CandidateSet
from darts_parallel.cost.table import CostTable, build_table
from darts_parallel.gradient.relaxed_cost import RelaxedPlans, surrogate
from darts_parallel.plan.space import OuterSpace
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem


@dataclass(frozen=True)
class TimeModel:
    """Seconds per step at one global batch size.

    `table` has one outer choice, one stage, the layers embedding, blocks, head and loss, and the
    blocks' candidates as strategies. The layers around the blocks are lossless.
    """

    table: CostTable
    choices: CandidateSet

    def seconds(self, weights: Tensor, edge_weights: Tensor) -> Tensor:
        """Expected seconds per step of R mixtures.

        Args:
            weights: Of the blocks' candidates, shape `(..., blocks, C)`.
            edge_weights: Of the tensor-parallel degrees of embedding, head and loss, shape `(..., 2, D)`.

        Returns:
            Shape `(...)`, float64.
        """
        first = torch.tensor([self._lossless(tp) for tp in self.degrees])
        edges = torch.zeros(*weights.shape[:-2], 2, weights.shape[-1], dtype=torch.float64)
        edges = edges.index_add(-1, first, edge_weights.double())
        # the loss is computed where the head is
        rows = torch.cat([edges[..., :1, :], weights.double(), edges[..., 1:, :], edges[..., 1:, :]], dim=-2)
        flat = rows.reshape(1, -1, *rows.shape[-2:])
        stages = torch.ones(*flat.shape[:-1], 1, dtype=torch.float64)
        return surrogate(RelaxedPlans(flat, stages), self.table).iteration_time.reshape(weights.shape[:-2])

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees, in the candidates' order."""
        return tuple(dict.fromkeys(c.tp for c in self.choices.candidates))

    def plan_seconds(self, plans: Sequence[Sequence[Candidate]]) -> Tensor:
        """Seconds per step of hard plans with the best degrees around their blocks, shape `(plans,)`."""
        return self._by_edges(plans).amin(0)

    def whole_plan(self, blocks: Sequence[Candidate]) -> Plan:
        """The plan of all layers, with the best degrees around the blocks."""
        best = divmod(int(self._by_edges([blocks])[:, 0].argmin()), len(self.degrees))
        first, last = (self.choices.candidates[self._lossless(self.degrees[i])].strategy for i in best)
        layers = (first, *(candidate.strategy for candidate in blocks), last, last)
        return Plan(1, (0, len(layers)), layers)

    def _by_edges(self, plans: Sequence[Sequence[Candidate]]) -> Tensor:
        """Seconds per step for every pair of degrees of the first and the last layers, `(D^2, plans)`."""
        index = torch.tensor([[self.choices.candidates.index(c) for c in plan] for plan in plans])
        weights = torch.nn.functional.one_hot(index, len(self.choices.candidates)).double()
        edges = torch.eye(len(self.degrees), dtype=torch.float64)
        times = [
            self.seconds(weights, torch.stack([a, b]).expand(len(plans), 2, -1)) for a in edges for b in edges
        ]
        return torch.stack(times)

    def _lossless(self, tp: int) -> int:
        return next(i for i, c in enumerate(self.choices.candidates) if c.tp == tp and c.lossless)


def build_time_model(problem: Problem, choices: CandidateSet) -> TimeModel:
    """Cost table of the candidates, one micro-batch, no pipeline.

    The tensor-parallel bits shorten only the forward all-reduces: the loop rounds partial sums in
    the forward pass and leaves those of backward exact.
    """
    strategies = tuple(candidate.strategy for candidate in choices.candidates)
    return TimeModel(build_table(problem, OuterSpace(1, (1,), strategies)), choices)
