"""One step of the descent with its gradient by hand: the closed form, one stage a device, a strategy a layer.

`surrogate` says what a relaxed plan costs and autograd finds the slope, in about 300 operations on small
tensors for each pipeline degree. Here the sums over strategies are one matrix product of every layer with a
matrix of its figures (seconds, bytes, layouts), the sums over layers one of every stage, and the slope goes
back through the same products transposed. `tests/gradient/test_fused_step.py` holds the two together.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.cost.table import CostTable

SMALLEST = 1e-300
"""Least scale of a smooth maximum, so that a stage without seconds divides nothing by 0."""


@dataclass(frozen=True)
class StepFigures:
    """A table as the matrices that relaxed weights are multiplied with."""

    table: CostTable
    figures: Tensor
    """Of every layer: seconds by kind, synchronisation by kind, static bytes, bytes in flight, working bytes,
    seconds paid once, and, of several layouts, which one a strategy holds; shape `(O, L, C, F)`."""
    pairs: Tensor | None
    """Seconds of resharding and p2p from layout to layout by kind, `(O * (L - 1), Y, (Q + P) * Y)`; None
    where there is one layout."""
    barred: Tensor | None
    """Minus infinity where a strategy is not legal, else 0, `(O, 1, 1, C)`; None where all are legal."""
    kinds: Tensor
    """Which kind every stage is of, `(K, Q)`, 0 or 1."""
    borders: Tensor
    """Which kind every boundary is of, `(K - 1, P)`, 0 or 1."""
    crossing: Tensor | None
    """Seconds of p2p where there is one layout, `(O, L - 1, P)`."""
    _repeated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def repeated(self, restarts: int) -> tuple[Tensor, Tensor]:
        """Micro-batches less one, `(O * R, 1)`, and those in flight, `(O * R, K)`, for every restart."""
        if restarts not in self._repeated:
            followers = (self.table.num_micro_batches - 1.0).repeat_interleave(restarts).unsqueeze(1)
            self._repeated[restarts] = followers, self.table.in_flight.repeat_interleave(restarts, 0)
        return self._repeated[restarts]

    def of_own_kind(self, values: Tensor) -> Tensor:
        """Every stage's value of its own kind, `(..., K)`, of values by kind `(..., K, Q)`."""
        return values.squeeze(-1) if values.shape[-1] == 1 else (values * self.kinds).sum(-1)

    def to_own_kind(self, values: Tensor) -> Tensor:
        """Values of stages `(..., K)` at their kinds, 0 elsewhere, `(..., K, Q)`."""
        by_kind = values.unsqueeze(-1)
        return by_kind if self.kinds.shape[-1] == 1 else by_kind * self.kinds

    @staticmethod
    def build(table: CostTable) -> "StepFigures":
        """Arrange the figures of a table whose pipeline has a closed form and one stage a device."""
        own = [*table.time.unbind(1), *table.sync.unbind(1), table.static, table.activation, table.working]
        several = table.num_layouts > 1
        layouts = torch.nn.functional.one_hot(table.layout, table.num_layouts).double()
        rows = [torch.stack([*own, table.per_iteration], dim=-1)]
        pairs = None
        if several:
            rows.append(layouts.expand(table.num_outer, table.num_layers, -1, -1))
            seconds = torch.cat([table.reshard, table.p2p], dim=1).permute(0, 2, 3, 1, 4)
            pairs = seconds.reshape(-1, table.num_layouts, seconds.shape[3] * table.num_layouts).contiguous()
        illegal = ~table.allowed[:, None, None, :]
        zeros = torch.zeros(illegal.shape, dtype=torch.float64)
        border = torch.nn.functional.one_hot(table.boundary_kind, max(table.p2p.shape[1], 1))
        return StepFigures(
            table=table,
            figures=torch.cat(rows, dim=-1).contiguous(),
            pairs=pairs,
            barred=zeros.masked_fill(illegal, -torch.inf) if bool(illegal.any()) else None,
            kinds=torch.nn.functional.one_hot(table.stage_kind, table.time.shape[1]).double(),
            borders=border.double(),
            crossing=None if several else table.p2p[..., 0, 0].transpose(1, 2).contiguous(),
        )


@dataclass(frozen=True)
class StepInput:
    """The weights of a step, and what they are annealed by."""

    logits: Tensor
    """Shape `(O, R, L, C)`; fastest where layers come before restarts in memory."""
    widths: Tensor
    """Shape `(O, R, K)`."""
    unit_of_layer: Tensor
    """Unit that every layer belongs to, `(L,)`, integer."""
    num_units: int
    temperature: float
    boundary_temperature: float
    sharpness: float
    hard_stages: bool
    natural: bool = False
    """The slope of the logits is the natural one, as of `relaxation.softmax_weights`."""


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
    """Forward pass of one step; `backward` may then be called once.

    Args:
        own: Figures of the table.
        given: Weights and temperatures.
    """

    def __init__(self, own: StepFigures, given: StepInput) -> None:
        self.own, self.given = own, given
        with torch.no_grad():
            self._choose()
            self._divide()
            self.cost = self._price()

    @property
    def _shape(self) -> tuple[int, int, int, int, int]:
        """Outer choices, restarts, layers, stages, kinds of stage."""
        table = self.own.table
        return table.num_outer, self.given.logits.shape[1], table.num_layers, table.pp, table.time.shape[1]

    def _choose(self) -> None:
        """Weights of the strategies and the expected figures of every layer."""
        outer, restarts, layers, _, _ = self._shape
        scaled = self.given.logits.detach().transpose(1, 2) * (1.0 / self.given.temperature)
        if self.own.barred is not None:
            scaled = scaled + self.own.barred
        self.choices = torch.softmax(scaled, dim=-1).contiguous()  # (O, L, R, C)
        figures = self.own.figures.flatten(0, 1)
        self.expected = torch.bmm(self.choices.view(outer * layers, restarts, -1), figures)
        self.expected = self.expected.view(outer, layers, restarts, -1)
        self.by_layer = self.expected.transpose(1, 2).reshape(outer * restarts, layers, -1)

    def _divide(self) -> None:
        """Weights of the stages, soft and as they are read."""
        outer, restarts, layers, stages, _ = self._shape
        units, given = self.given.num_units, self.given
        self.least = 0.5 / units if stages * 0.5 < units else 0.0
        self.shares = torch.softmax(given.widths.detach(), dim=-1)
        edges = units * (self.least + (1.0 - stages * self.least) * self.shares).cumsum(-1)[..., :-1]
        centres = given.unit_of_layer.to(edges.dtype) + 0.5
        passed = (centres.unsqueeze(-1) - edges.unsqueeze(-2)).mul_(1.0 / given.boundary_temperature)
        self.passed = passed.sigmoid_().view(outer * restarts, layers, stages - 1)
        beyond = torch.nn.functional.pad(self.passed, (1, 1))
        beyond[..., 0] = 1.0
        self.stages = beyond[..., :-1] - beyond[..., 1:]
        if given.hard_stages:
            largest = self.stages.argmax(-1, keepdim=True)
            self.stages = torch.zeros_like(self.stages).scatter_(-1, largest, 1.0)

    def _price(self) -> StepCost:
        """Seconds and bytes."""
        given = self.given
        outer, restarts, layers, stages, kinds = self._shape
        summed = 2 * kinds + 2
        self.sums = torch.bmm(self.stages.transpose(1, 2), self.by_layer[..., :summed])  # (OR, K, 2 Q + 2)
        seconds = self.own.of_own_kind(self.sums[..., :kinds]) + self._between()
        sync = self.own.of_own_kind(self.sums[..., kinds : 2 * kinds])
        (slowest, last), shares = _smooth_max(torch.stack([seconds, sync]), given.sharpness)
        self.slow_share, self.sync_share = shares
        self.followers, self.flight = self.own.repeated(restarts)
        once = self.by_layer[..., summed + 1].sum(1)
        total = seconds.sum(-1) + self.followers[:, 0] * slowest + last + once
        at_work = self.stages * self.by_layer[..., summed, None]
        scale = at_work.amax(1, keepdim=True).clamp_(min=SMALLEST)
        self.work_share = at_work.div_(scale).sub_(1.0).mul_(given.sharpness).exp_()
        total_share = self.work_share.sum(1, keepdim=True)
        self.work_share /= total_share
        working = ((total_share.log() / given.sharpness + 1.0) * scale).squeeze(1)
        memory = self.sums[..., 2 * kinds] + self.flight * self.sums[..., 2 * kinds + 1] + working
        size = (outer, restarts)
        return StepCost(
            choices=self.choices.transpose(1, 2),
            stages=self.stages.view(*size, layers, stages),
            iteration_time=total.view(size),
            stage_seconds=seconds.view(*size, stages),
            memory=memory.view(*size, stages),
            sync=last.view(size),
        )

    def _between(self) -> Tensor:
        """Seconds of resharding and blocking p2p of every stage, `(O * R, K)`."""
        outer, restarts, layers, stages, kinds = self._shape
        before, after = self.stages[:, :-1], self.stages[:, 1:]
        seconds = self.stages.new_zeros(outer * restarts, stages)
        self.reshard: Tensor | None = None
        if self.own.pairs is not None:
            held = self.expected[..., 2 * kinds + 4 :]
            self.held_after = held[:, 1:].unsqueeze(-2)
            self.reached = torch.bmm(held[:, :-1].reshape(-1, restarts, held.shape[-1]), self.own.pairs)
            self.reached = self.reached.view(outer, layers - 1, restarts, -1, held.shape[-1])
            change = (self.reached * self.held_after).sum(-1).transpose(1, 2).flatten(0, 1)
            self.reshard, self.p2p = change[..., :kinds].contiguous(), change[..., kinds:].contiguous()
            self.both = before * after
            seconds += self.own.of_own_kind(torch.bmm(self.both.transpose(1, 2), self.reshard))
        elif self.own.crossing is not None:
            self.p2p = self.own.crossing.repeat_interleave(restarts, 0)
        self.crossed = stages > 1 and self.own.table.pipeline.blocking
        if self.crossed:
            self.leaving = before[..., :-1] * after[..., 1:]
            across = torch.bmm(self.leaving.transpose(1, 2), self.p2p)
            seconds[:, 1:] += (across * self.own.borders).sum(-1)
        return seconds

    def backward(self, per_second: Tensor, per_byte: Tensor) -> tuple[Tensor, Tensor]:
        """Slope of a loss in the logits and in the widths.

        Args:
            per_second: Slope of the loss in the iteration time, `(O, R)`.
            per_byte: Slope in the bytes of every stage, `(O, R, K)`.

        Returns:
            Shapes of the logits and of the widths.
        """
        with torch.no_grad():
            outer, restarts, layers, _, _ = self._shape
            paid, bytes_ = per_second.reshape(-1, 1), per_byte.flatten(0, 1)
            slope = paid * (1.0 + self.followers * self.slow_share)
            by_kind = self.own.to_own_kind(slope)
            sync_by_kind = self.own.to_own_kind(paid * self.sync_share)
            rest = torch.stack([bytes_, bytes_ * self.flight], dim=-1)
            to_sums = torch.cat([by_kind, sync_by_kind, rest], dim=-1)
            summed = to_sums.shape[-1]
            to_stages = torch.bmm(self.by_layer[..., :summed], to_sums.transpose(1, 2))
            to_layers = torch.zeros_like(self.by_layer)
            to_layers[..., :summed] = torch.bmm(self.stages, to_sums)
            to_work = self.work_share * bytes_.unsqueeze(1)
            to_layers[..., summed] = (to_work * self.stages).sum(-1)
            to_layers[..., summed + 1] = paid
            to_stages += to_work.mul_(self.by_layer[..., summed, None])
            to_change = self._between_slopes(slope, by_kind, to_stages)
            to_expected = to_layers.view(outer, restarts, layers, -1).transpose(1, 2).contiguous()
            if self.own.pairs is not None and to_change is not None:
                self._layout_slopes(to_change, to_expected[..., summed + 2 :])
            return self._logit_slopes(to_expected), self._width_slopes(to_stages)

    def _between_slopes(self, slope: Tensor, by_kind: Tensor, to_stages: Tensor) -> Tensor | None:
        """Add to the slopes in stage weights what lies between layers; returns those in its seconds."""
        before, after = self.stages[:, :-1], self.stages[:, 1:]
        parts = []
        if self.reshard is not None:
            both = torch.bmm(self.reshard, by_kind.transpose(1, 2))
            to_stages[:, :-1] += both * after
            to_stages[:, 1:] += both * before
            parts.append(torch.bmm(self.both, by_kind))
        if self.crossed:
            by_border = slope[:, 1:].unsqueeze(-1) * self.own.borders
            leaving = torch.bmm(self.p2p, by_border.transpose(1, 2))
            to_stages[:, :-1, :-1] += leaving * after[..., 1:]
            to_stages[:, 1:, 1:] += leaving * before[..., :-1]
            parts.append(torch.bmm(self.leaving, by_border))
        elif self.reshard is not None:
            parts.append(torch.zeros_like(self.p2p))
        return torch.cat(parts, dim=-1) if self.reshard is not None else None

    def _layout_slopes(self, to_change: Tensor, to_held: Tensor) -> None:
        """Add the slopes in the layouts' weights, `to_held` `(O, L, R, Y)`, of the seconds between layers."""
        outer, restarts, layers, _, _ = self._shape
        assert self.own.pairs is not None
        change = to_change.view(outer, restarts, layers - 1, -1).transpose(1, 2).unsqueeze(-1)
        to_held[:, 1:] += (change * self.reached).sum(-2)
        reached = (change * self.held_after).reshape(outer * (layers - 1), restarts, -1)
        before = torch.bmm(reached, self.own.pairs.transpose(1, 2))
        to_held[:, :-1] += before.view(outer, layers - 1, restarts, -1)

    def _logit_slopes(self, to_expected: Tensor) -> Tensor:
        """Slope in the logits, `(O, R, L, C)`, from those in the expected figures `(O, L, R, F)`."""
        to_choices = torch.bmm(
            to_expected.flatten(0, 1), self.own.figures.flatten(0, 1).transpose(1, 2)
        ).view_as(self.choices)
        mean = (to_choices * self.choices).sum(-1, keepdim=True)
        to_choices.sub_(mean)
        if not self.given.natural:
            to_choices.mul_(self.choices).mul_(1.0 / self.given.temperature)
        else:
            to_choices.mul_(self.given.temperature)
            if self.own.barred is not None:
                to_choices.masked_fill_(self.own.barred.isinf(), 0.0)
        return to_choices.transpose(1, 2)

    def _width_slopes(self, to_stages: Tensor) -> Tensor:
        """Slope in the widths, `(O, R, K)`, from those in the stage weights (straight-through if hard)."""
        outer, restarts, _, stages, _ = self._shape
        to_passed = to_stages[..., 1:] - to_stages[..., :-1]
        moved = to_passed.mul_(self.passed).mul_(1.0 - self.passed).sum(1)
        to_edges = moved.mul_(-self.given.num_units / self.given.boundary_temperature)
        to_shares = torch.nn.functional.pad(to_edges.flip(-1).cumsum(-1).flip(-1), (0, 1))
        to_shares = to_shares.mul_(1.0 - stages * self.least).view(outer, restarts, stages)
        return self.shares * (to_shares - (self.shares * to_shares).sum(-1, keepdim=True))


def _smooth_max(values: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    """`relaxation.smooth_max` over the last axis, and its slope in every value."""
    scale = values.amax(-1, keepdim=True).clamp(min=SMALLEST)
    relative = (values / scale - 1.0).mul_(sharpness).exp_()
    total = relative.sum(-1, keepdim=True)
    return ((total.log() / sharpness + 1.0) * scale).squeeze(-1), relative / total
