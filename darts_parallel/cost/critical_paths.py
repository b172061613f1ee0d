"""The longest path of a schedule as a linear cost: its criticalities, remembered between simulations.

The seconds of a schedule are a maximum over paths of sums of passes. How often the longest path takes each
stage's forward, backward, weight pass, message and synchronisation is the gradient of the seconds in them:
their criticality. Held fixed, these counts make the cost linear in the stages' seconds. Since every path is
a lower bound of the longest one, the largest of several remembered paths is a lower bound too, exact where
one of them was taken (a cutting-plane model, Kelley 1960, The cutting-plane method for solving convex
programs).
"""

from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.simulation import PassSeconds, simulated_seconds


@dataclass(frozen=True)
class Criticalities:
    """How often the longest paths of B plans take each of their rows of seconds."""

    forward: Tensor
    """Times that the stage's forward pass lies on the path, `(B, S)`."""
    backward: Tensor
    weight_gradient: Tensor
    message: Tensor
    """Shape `(B, S - 1)`."""
    sync: Tensor
    """Shape `(B, pp)`; 1 for the device that the iteration waits for."""

    @staticmethod
    def of(
        passes: PassSeconds,
        sync: Tensor,
        num_micro_batches: Tensor,
        pp: int,
        model: PipelineModel,
        *,
        whole: bool = False,
    ) -> "Criticalities":
        """Count those of one longest path of each plan; arguments as in `simulated_seconds`.

        With `whole` they are a path through the schedule, else possibly one and its repetition beyond it.
        """
        leaves = [row.detach().clone().requires_grad_() for row in (*vars(passes).values(), sync)]
        with torch.enable_grad():
            total, _ = simulated_seconds(
                PassSeconds(*leaves[:4]), leaves[4], num_micro_batches, pp, model, whole=whole
            )
        given = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
        return Criticalities(
            *(torch.zeros_like(leaf) if row is None else row for leaf, row in zip(leaves, given, strict=True))
        )

    def seconds(self, passes: PassSeconds, sync: Tensor) -> Tensor:
        """Return the seconds along the paths, at most those of the schedule, `(B,)`."""
        counted = zip(vars(self).values(), (*vars(passes).values(), sync), strict=True)
        total: Tensor = reduce(torch.add, ((count * seconds).sum(-1) for count, seconds in counted))
        return total

    def awaited(self, sync: Tensor) -> Tensor:
        """Return the synchronisation seconds on the path, `(B,)`."""
        return (self.sync * sync).sum(-1)


@dataclass
class PathMemory:
    """Critical paths of the relaxed plans of one batch, simulated again every few steps."""

    every: int
    """Steps between simulations."""
    keep: int = 4
    """Paths that are remembered of every plan."""
    steps: int = field(default=0, init=False)
    paths: list[Criticalities] = field(default_factory=list, init=False)

    def seconds(
        self, passes: PassSeconds, sync: Tensor, num_micro_batches: Tensor, pp: int, model: PipelineModel
    ) -> tuple[Tensor, Tensor]:
        """Return the seconds of an iteration along the longest remembered path, differentiable.

        Args:
            passes, sync, num_micro_batches, pp, model: As in `simulated_seconds`, of the same B plans at
                every call.

        Returns:
            Seconds, and the synchronisation among them, each `(B,)`. Exact in steps that simulate.
        """
        if self.steps % self.every == 0:
            newest = Criticalities.of(passes, sync, num_micro_batches, pp, model)
            self.paths = [*self.paths[1 - self.keep :], newest] if self.keep > 1 else [newest]
        self.steps += 1
        values = torch.stack([path.seconds(passes, sync) for path in self.paths])
        awaited = torch.stack([path.awaited(sync) for path in self.paths])
        total, longest = values.max(0)
        return total, awaited.gather(0, longest.unsqueeze(0)).squeeze(0)

    def forget(self) -> None:
        """Simulate at the next step: the plans have become others."""
        self.steps, self.paths = 0, []
