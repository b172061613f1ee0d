"""One step of the descent with its gradient by hand: the closed form, one stage a device, a strategy a layer.

`surrogate` says what a relaxed plan costs and autograd finds the slope, in about 300 operations on small
tensors for each pipeline degree. Here the sums over strategies are one matrix product of every layer with a
matrix of its figures (seconds, bytes, layouts), the sums over layers one of every stage, and the slope goes
back through the same products transposed. At these sizes an operation costs more than its arithmetic, and a
view or a new tensor as much as an operation, so that all are made once and every step writes into them.
`tests/gradient/test_fused_step.py` holds the two together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.gradient.kernels.step_parts import (
    ChoiceWeights,
    NeighbourSeconds,
    SmoothMaximum,
    StageWeights,
    StepFigures,
    of_own_kind,
    zeros,
)
from darts_parallel.gradient.relaxation import Schedules


@dataclass(frozen=True)
class StepCost:
    """The relaxed plans of a step and their costs; shapes as in `RelaxedPlans` and `SurrogateCost`."""

    choices: Tensor
    stages: Tensor
    iteration_time: Tensor
    stage_seconds: Tensor
    memory: Tensor
    sync: Tensor


class FusedStep:
    """One step for all restarts of a table; what it returns lasts until the next one.

    Args:
        own: Figures of the table.
        logits: Shape `(O, R, L, C)`, read at every step; fastest where layers come before restarts in memory.
        widths: Shape `(O, R, K)`, read at every step.
        unit_of_layer: Unit that every layer belongs to, `(L,)`, integer.
        num_units: Number of units.
    """

    def __init__(
        self, own: StepFigures, logits: Tensor, widths: Tensor, unit_of_layer: Tensor, num_units: int
    ) -> None:
        table, size = own.table, logits.shape[:2]
        self.own, self.choices = own, ChoiceWeights(own, logits)
        self.stages = StageWeights(widths, unit_of_layer, num_units)
        self.neighbours = NeighbourSeconds(own, self.choices, self.stages)
        rows, stages, layers = self.stages.weights.shape
        kinds, columns = own.kinds.shape[1], 2 * own.kinds.shape[1] + 3
        self.pair, self.working = SmoothMaximum(2, rows, stages), SmoothMaximum(rows, stages, layers)
        self.slowest, self.last = self.pair.found
        self.seconds, self.sync = self.pair.values
        self.slow_share, self.sync_share = self.pair.share
        self.sums, self.to_sums = (zeros(rows, stages, columns) for _ in range(2))
        self.time, self.synced = self.sums[..., :kinds], self.sums[..., kinds : 2 * kinds]
        self.static, self.carried, self.once = self.sums[..., 2 * kinds :].unbind(-1)
        self.to_time, self.to_synced = self.to_sums[..., :kinds], self.to_sums[..., kinds : 2 * kinds]
        self.to_static, self.to_carried, self.to_once = self.to_sums[..., 2 * kinds :].unbind(-1)
        self.figures, self.to_figures = (
            values[..., :columns] for values in (self.choices.by_layer, self.choices.to_layers)
        )
        self.work, self.to_work = self.choices.by_layer[..., columns], self.choices.to_layers[..., columns]
        self.worked = self.work.unsqueeze(1)
        self.total, self.paid_once, self.memory = zeros(rows), zeros(rows), zeros(rows, stages)
        self.slope, self.at_work = zeros(rows, stages), torch.zeros_like(self.stages.weights)
        self.followers = (table.num_micro_batches - 1.0).repeat_interleave(size[1])
        self.flight = table.in_flight.repeat_interleave(size[1], 0)
        self.later = self.seconds[:, 1:], self.slope[:, 1:]
        self.cost = StepCost(
            choices=self.choices.weights.transpose(1, 2),
            stages=self.stages.weights.view(*size, stages, layers).transpose(2, 3),
            iteration_time=self.total.view(size),
            stage_seconds=self.seconds.view(*size, stages),
            memory=self.memory.view(*size, stages),
            sync=self.last.view(size),
        )

    @torch.no_grad()
    def forward(self, schedules: Schedules) -> StepCost:
        """Costs of the relaxed plans at their logits and widths of now."""
        self.choices.forward(schedules.temperature)
        self.stages.forward(schedules.boundary_temperature, hard=schedules.hard_stages)
        torch.bmm(self.stages.weights, self.figures, out=self.sums)
        self.seconds.copy_(of_own_kind(self.time, self.own.kinds))
        self.sync.copy_(of_own_kind(self.synced, self.own.kinds))
        self.neighbours.add_to(self.seconds, self.later[0])
        self.pair.forward(schedules.sharpness)
        torch.sum(self.seconds, -1, out=self.total)
        torch.sum(self.once, -1, out=self.paid_once)
        self.total.addcmul_(self.followers, self.slowest).add_(self.last).add_(self.paid_once)
        torch.mul(self.stages.weights, self.worked, out=self.working.values)
        self.working.forward(schedules.sharpness)
        torch.addcmul(self.static, self.flight, self.carried, out=self.memory)
        self.memory.add_(self.working.found)
        return self.cost

    @torch.no_grad()
    def backward(
        self, schedules: Schedules, per_second: Tensor, per_byte: Tensor, *, natural: bool
    ) -> tuple[Tensor, Tensor]:
        """Slope of a loss in the logits and in the widths, after `forward` with equal `schedules`.

        Args:
            schedules: Temperatures.
            per_second: Slope of the loss in the iteration time, `(O, R)`.
            per_byte: Slope in the bytes of every stage, `(O, R, K)`.
            natural: The slope of the logits is the natural one, as of `relaxation.softmax_weights`.

        Returns:
            Shapes of the logits and of the widths.
        """
        paid, bytes_ = per_second.reshape(-1, 1), per_byte.flatten(0, 1)
        torch.mul(self.slow_share, self.followers.unsqueeze(1), out=self.slope)
        self.slope.add_(1.0).mul_(paid)
        torch.mul(self.slope.unsqueeze(-1), self.own.kinds, out=self.to_time)
        torch.mul((paid * self.sync_share).unsqueeze(-1), self.own.kinds, out=self.to_synced)
        self.to_static.copy_(bytes_)
        torch.mul(bytes_, self.flight, out=self.to_carried)
        self.to_once.copy_(paid)
        torch.bmm(self.to_sums, self.figures.transpose(1, 2), out=self.stages.to_weights)
        torch.bmm(self.stages.weights.transpose(1, 2), self.to_sums, out=self.to_figures)
        torch.mul(self.working.share, bytes_.unsqueeze(-1), out=self.at_work)
        self.stages.to_weights.addcmul_(self.at_work, self.worked)
        self.at_work.mul_(self.stages.weights)
        torch.sum(self.at_work, 1, out=self.to_work)
        self.neighbours.backward(self.slope, self.later[1])
        slopes = self.choices.backward(schedules.temperature, natural=natural)
        return slopes, self.stages.backward(schedules.boundary_temperature)
