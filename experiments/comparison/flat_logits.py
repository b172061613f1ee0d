"""The gradient search with one set of strategy logits for all numbers of micro-batches: what "flat" costs.

The search proper gives every outer choice logits of its own, conditional on it. Here the outer choices of a
pipeline degree share theirs, so that a relaxed plan is a product of independent softmaxes. (Pipeline
degrees still have their own: their strategies divide other numbers of devices.) Shared parameters are
kept as equal copies: equal at first, and moved by the same gradient, the mean over the outer choices
weighted by the outer softmax.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.descent import GradientSearch
from darts_parallel.gradient.restarts import RestartBatch
from darts_parallel.gradient.step_record import StepRecord


class FlatSearch(GradientSearch):
    """`GradientSearch` whose logits and stage widths are shared by the outer choices of a table."""

    def _initial_groups(self, tables: Sequence[CostTable]) -> list[RestartBatch]:
        groups = super()._initial_groups(tables)
        for group in groups:
            with torch.no_grad():
                for values in (group.logits, group.widths):
                    values.copy_(values[:1].expand_as(values).clone())
        return groups

    def _one_step(self) -> tuple[StepRecord | None, list[Tensor]]:
        handles = []
        for group, weights in zip(self.groups, self._outer_weights(), strict=True):
            group.figures = None  # the step by hand knows no hooks
            for values in (group.logits, group.widths):
                handles.append(values.register_hook(_sharing(weights)))  # type: ignore[no-untyped-call]
        result = super()._one_step()
        for handle in handles:
            handle.remove()
        return result

    def _outer_weights(self) -> list[Tensor]:
        """Probability of every outer choice within its group, `(O,)` each."""
        ends = torch.tensor([len(group.names) for group in self.groups]).cumsum(0)
        return [p / p.sum() for p in torch.tensor_split(self.outer_logits.weights, ends[:-1])]

    def _behind(self, group: RestartBatch, merit: Tensor, leading: float) -> Tensor:
        """None leaves before its bound excludes it: all learn together."""
        return torch.zeros(len(merit), dtype=torch.float64)

    def _thin(self, merits: list[Tensor]) -> None:
        """Keep equal restarts for all outer choices, the best by their best outer choice."""
        super()._thin([merit.amin(0, keepdim=True).expand_as(merit) for merit in merits])


def _sharing(weights: Tensor) -> Callable[[Tensor], Tensor]:
    """A gradient hook: every outer choice gets the weighted mean; its shape is `(O, R, ...)`."""

    def share(gradient: Tensor) -> Tensor:
        column = weights.view(-1, *[1] * (gradient.dim() - 1))
        return (column * gradient).sum(0, keepdim=True).expand_as(gradient)

    return share
