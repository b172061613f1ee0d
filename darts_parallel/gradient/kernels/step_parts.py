"""The parts of a step of the descent by hand: strategies, stages, what lies between, smooth maxima.

Each holds its tensors and the views of them that it needs, and computes into them: forward, then backward.
"""

from dataclasses import dataclass

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
    """Of every layer: seconds by kind, synchronisation by kind, static bytes, bytes in flight, seconds paid
    once, working bytes, and, of several layouts, which one a strategy holds; shape `(O * L, C, F)`."""
    pairs: Tensor | None
    """Seconds of resharding and p2p to the next layer from layout to layout by kind, 0 after the last layer,
    `(O * L, Y, (Q + P) * Y)`; None where there is one layout."""
    barred: Tensor | None
    """Minus infinity where a strategy is not legal, else 0, `(O, 1, 1, C)`; None where all are legal."""
    kinds: Tensor
    """Which kind every stage is of, `(K, Q)`, 0 or 1."""
    borders: Tensor
    """Which kind every boundary is of, `(K - 1, P)`, 0 or 1."""
    crossing: Tensor | None
    """Seconds of p2p to the next layer where there is one layout, 0 after the last layer, `(O, L, P)`."""

    @staticmethod
    def build(table: CostTable) -> "StepFigures":
        """Arrange the figures of a table whose pipeline has a closed form and one stage a device."""
        own = [*table.time.unbind(1), *table.sync.unbind(1), table.static, table.activation]
        several = table.num_layouts > 1
        layouts = torch.nn.functional.one_hot(table.layout, table.num_layouts).double()
        rows = [torch.stack([*own, table.per_iteration, table.working], dim=-1)]
        pairs = None
        if several:
            rows.append(layouts.expand(table.num_outer, table.num_layers, -1, -1))
            seconds = torch.cat([table.reshard, table.p2p], dim=1).permute(0, 2, 3, 1, 4)
            pairs = torch.nn.functional.pad(seconds, (0, 0, 0, 0, 0, 0, 0, 1))
            pairs = pairs.reshape(-1, table.num_layouts, seconds.shape[3] * table.num_layouts).contiguous()
        illegal = ~table.allowed[:, None, None, :]
        zeros = torch.zeros(illegal.shape, dtype=torch.float64)
        border = torch.nn.functional.one_hot(table.boundary_kind, max(table.p2p.shape[1], 1))
        crossing = torch.nn.functional.pad(table.p2p[..., 0, 0].transpose(1, 2), (0, 0, 0, 1))
        return StepFigures(
            table=table,
            figures=torch.cat(rows, dim=-1).flatten(0, 1).contiguous(),
            pairs=pairs,
            barred=zeros.masked_fill(illegal, -torch.inf) if bool(illegal.any()) else None,
            kinds=torch.nn.functional.one_hot(table.stage_kind, table.time.shape[1]).double(),
            borders=border.double(),
            crossing=None if several else crossing,
        )


@torch.no_grad()
def zeros(*shape: int) -> Tensor:
    """Zeros in double precision."""
    return torch.zeros(shape, dtype=torch.float64)


class ChoiceWeights:
    """Weights of the strategies and the expected figures of every layer.

    Attributes:
        weights: Shape `(O, L, R, C)`.
        by_layer: Expected figures but the layouts, `(O * R, L, F - Y)`.
        held: Weights of the layouts and of those of the next layer, `(O * L, R, Y)` both; what follows the
            last layer of an outer choice means nothing.
    """

    def __init__(self, own: StepFigures, logits: Tensor) -> None:
        table, restarts = own.table, logits.shape[1]
        self.own, outer, layers = own, table.num_outer, table.num_layers
        rows, figures = outer * layers, own.figures.shape[-1]
        self.first_layout = figures - (0 if own.pairs is None else table.num_layouts)
        self.logits = logits.detach().transpose(1, 2)
        self.weights = zeros(*self.logits.shape)
        self.by_row = self.weights.view(rows, restarts, -1)
        self.summed = zeros(*self.logits.shape[:3], 1)
        # one row more than there are layers, for what follows the last one
        self.expected, self.slopes = (zeros(rows + 1, restarts, figures) for _ in range(2))
        self.expected_rows, self.slope_rows = self.expected[:-1], self.slopes[:-1]
        self.by_layer = zeros(outer * restarts, layers, self.first_layout)
        self.held = (self.expected[:-1, :, self.first_layout :], self.expected[1:, :, self.first_layout :])
        self.to_held = (self.slopes[:-1, :, self.first_layout :], self.slopes[1:, :, self.first_layout :])
        self.transposed = own.figures.transpose(1, 2)
        self.to_weights, self.share = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.to_rows = self.to_weights.view(rows, restarts, -1)

        def restarts_first(values: Tensor) -> Tensor:
            return values.view(outer, layers, restarts, -1)[..., : self.first_layout].transpose(1, 2)

        by_outer = (outer, restarts, layers, self.first_layout)
        self.copied = self.by_layer.view(by_outer), restarts_first(self.expected_rows)
        self.to_layers = torch.zeros_like(self.by_layer)
        self.returned = restarts_first(self.slope_rows), self.to_layers.view(by_outer)

    def forward(self, temperature: float) -> None:
        """Softmax of the logits; by hand, because torch's takes its time for every row."""
        torch.mul(self.logits, 1.0 / temperature, out=self.weights)
        if self.own.barred is not None:
            self.weights.add_(self.own.barred)
        torch.amax(self.weights, -1, keepdim=True, out=self.summed)
        self.weights.sub_(self.summed).exp_()
        torch.sum(self.weights, -1, keepdim=True, out=self.summed)
        self.weights.div_(self.summed)
        torch.bmm(self.by_row, self.own.figures, out=self.expected_rows)
        self.copied[0].copy_(self.copied[1])

    def backward(self, temperature: float, *, natural: bool) -> Tensor:
        """Slope in the logits, `(O, R, L, C)`, from `to_layers` and `to_held`."""
        self.returned[0].copy_(self.returned[1])
        torch.bmm(self.slope_rows, self.transposed, out=self.to_rows)
        torch.mul(self.to_weights, self.weights, out=self.share)
        torch.sum(self.share, -1, keepdim=True, out=self.summed)
        self.to_weights.sub_(self.summed)
        if not natural:
            self.to_weights.mul_(self.weights).mul_(1.0 / temperature)
        else:
            self.to_weights.mul_(temperature)
            if self.own.barred is not None:
                self.to_weights.masked_fill_(self.own.barred.isinf(), 0.0)
        return self.to_weights.transpose(1, 2)


class StageWeights:
    """Weights of the stages, soft or as they are read.

    Attributes:
        weights: Shape `(O * R, K, L)`.
    """

    def __init__(self, widths: Tensor, unit_of_layer: Tensor, num_units: int) -> None:
        restarts, stages = widths.shape[0] * widths.shape[1], widths.shape[2]
        layers, inner = len(unit_of_layer), stages - 1
        least = 0.5 / num_units if stages * 0.5 < num_units else 0.0
        self.widths, self.shares = widths.detach().view(restarts, stages), zeros(restarts, stages)
        self.free = num_units * (1.0 - stages * least)
        """Units that widths divide; every stage has `least` of the units beside."""
        self.before = torch.ones(stages, inner, dtype=torch.float64).triu()
        self.after = self.before.T.contiguous()
        self.first = num_units * least * torch.arange(1.0, stages, dtype=torch.float64)
        self.edges, self.to_edges = (zeros(restarts, inner) for _ in range(2))
        self.edge_columns = self.edges.unsqueeze(-1)
        self.centres = unit_of_layer.double() + 0.5
        beyond = zeros(restarts, stages + 1, layers)
        beyond[:, 0] = 1.0
        self.passed, self.reached, self.left = beyond[:, 1:-1], beyond[:, :-1], beyond[:, 1:]
        self.weights, self.to_weights = (zeros(restarts, stages, layers) for _ in range(2))
        self.to_later, self.to_earlier = self.to_weights[:, 1:], self.to_weights[:, :-1]
        self.slope, self.to_passed = (zeros(restarts, inner, layers) for _ in range(2))
        self.to_shares, self.mean = zeros(restarts, stages), zeros(restarts, 1)
        self.to_widths = zeros(*widths.shape)
        self.flat = self.to_widths.view(restarts, stages)

    def forward(self, temperature: float, *, hard: bool) -> None:
        """Widths to edges, edges to weights."""
        torch.softmax(self.widths, -1, out=self.shares)
        torch.addmm(self.first, self.shares, self.before, alpha=self.free, out=self.edges)
        torch.sub(self.centres, self.edge_columns, out=self.to_passed)
        self.to_passed.mul_(1.0 / temperature)
        torch.sigmoid(self.to_passed, out=self.passed)
        torch.sub(self.reached, self.left, out=self.weights)
        if hard:
            largest = self.weights.argmax(1, keepdim=True)
            self.weights.zero_().scatter_(1, largest, 1.0)

    def backward(self, temperature: float) -> Tensor:
        """Slope in the widths, `(O, R, K)`, from `to_weights` (straight-through if hard)."""
        torch.sub(self.to_later, self.to_earlier, out=self.to_passed)
        torch.addcmul(self.passed, self.passed, self.passed, value=-1.0, out=self.slope)
        self.to_passed.mul_(self.slope)
        torch.sum(self.to_passed, -1, out=self.to_edges)
        torch.mm(self.to_edges, self.after, out=self.to_shares)
        self.to_shares.mul_(-self.free / temperature)
        torch.mul(self.shares, self.to_shares, out=self.flat)
        torch.sum(self.flat, -1, keepdim=True, out=self.mean)
        self.flat.addcmul_(self.shares, self.mean, value=-1.0)
        return self.to_widths


class SmoothMaximum:
    """`relaxation.smooth_max` over the last axis of `values`, and its slope.

    Attributes:
        found: Without the last axis.
        share: Slope in every value.
    """

    def __init__(self, *shape: int) -> None:
        self.values, self.share = zeros(*shape), zeros(*shape)
        self.scale, self.total = (zeros(*shape[:-1], 1) for _ in range(2))
        self.maximum = zeros(*shape[:-1], 1)
        self.found = self.maximum.squeeze(-1)

    def forward(self, sharpness: float) -> None:
        """Read `values`."""
        torch.amax(self.values, -1, keepdim=True, out=self.scale)
        self.scale.clamp_(min=SMALLEST)
        torch.div(self.values, self.scale, out=self.share)
        self.share.sub_(1.0).mul_(sharpness).exp_()
        torch.sum(self.share, -1, keepdim=True, out=self.total)
        self.share.div_(self.total)
        torch.log(self.total, out=self.maximum)
        self.maximum.div_(sharpness).add_(1.0).mul_(self.scale)


class NeighbourSeconds:
    """Seconds of resharding and blocking p2p between layers."""

    def __init__(self, own: StepFigures, choices: ChoiceWeights, stages: StageWeights) -> None:
        self.own, self.choices, self.stages = own, choices, stages
        table, weights, to_weights = own.table, stages.weights, stages.to_weights
        rows, count, layers = weights.shape
        restarts, kinds, borders = rows // table.num_outer, own.kinds.shape[1], own.borders.shape[1]
        self.crossed = count > 1 and table.pipeline.blocking
        self.staying, self.leaving = zeros(rows, count, layers), zeros(rows, max(count - 1, 0), layers)
        # none of a layer's neighbours follows the last one: its column stays 0
        self.stay = self.staying[..., :-1], weights[..., :-1], weights[..., 1:]
        self.leave = self.leaving[..., :-1], weights[:, :-1, :-1], weights[:, 1:, 1:]
        self.to_stay = to_weights[..., :-1], to_weights[..., 1:]
        self.to_leave = to_weights[:, :-1, :-1], to_weights[:, 1:, 1:]
        self.by_kind, self.by_border = zeros(rows, count, kinds), zeros(rows, max(count - 1, 0), borders)
        self.to_staying, self.to_leaving = torch.zeros_like(self.staying), torch.zeros_like(self.leaving)
        self.to_stayed, self.to_left = self.to_staying[..., :-1], self.to_leaving[..., :-1]
        if own.crossing is not None:
            self.p2p = own.crossing.repeat_interleave(restarts, 0)
            return
        assert own.pairs is not None
        size = (table.num_outer * layers, restarts, kinds + borders, table.num_layouts)
        self.reached, self.met = zeros(*size), zeros(*size)
        self.reached_rows, self.met_rows = self.reached.flatten(2), self.met.flatten(2)
        self.change, self.back = zeros(*size[:3]), own.pairs.transpose(1, 2)
        self.next_held = choices.held[1].unsqueeze(-2)
        self.to_before, self.to_after = (zeros(*size[:2], size[3]) for _ in range(2))
        self.between, self.to_between = (zeros(rows, layers, size[2]) for _ in range(2))
        self.reshard, self.p2p = self.between[..., :kinds], self.between[..., kinds:]
        self.to_reshard, self.to_p2p = self.to_between[..., :kinds], self.to_between[..., kinds:]

        def layers_first(values: Tensor) -> Tensor:
            return values.view(table.num_outer, restarts, layers, -1).transpose(1, 2)

        self.change_rows = self.change.view(table.num_outer, layers, restarts, -1)
        self.copied, self.returned = layers_first(self.between), layers_first(self.to_between)
        self.changed = self.change.unsqueeze(-1)

    def add_to(self, seconds: Tensor, later: Tensor) -> None:
        """Add what every stage pays to `seconds` `(O * R, K)`, of which `later` are those after the first."""
        own = self.own
        if own.pairs is not None:
            torch.bmm(self.choices.held[0], own.pairs, out=self.reached_rows)
            torch.mul(self.reached, self.next_held, out=self.met)
            torch.sum(self.met, -1, out=self.change)
            self.copied.copy_(self.change_rows)
            torch.mul(self.stay[1], self.stay[2], out=self.stay[0])
            torch.bmm(self.staying, self.reshard, out=self.by_kind)
            seconds.add_(of_own_kind(self.by_kind, own.kinds))
        if self.crossed:
            torch.mul(self.leave[1], self.leave[2], out=self.leave[0])
            torch.bmm(self.leaving, self.p2p, out=self.by_border)
            later.add_(of_own_kind(self.by_border, own.borders))

    def backward(self, slope: Tensor, later: Tensor) -> None:
        """Add slopes to those of stages and layouts, given those in the seconds, as of `add_to`."""
        own, several = self.own, self.own.pairs is not None
        if several:
            torch.mul(slope.unsqueeze(-1), own.kinds, out=self.by_kind)
            torch.bmm(self.by_kind, self.reshard.transpose(1, 2), out=self.to_staying)
            self.to_stay[0].addcmul_(self.to_stayed, self.stay[2])
            self.to_stay[1].addcmul_(self.to_stayed, self.stay[1])
            torch.bmm(self.staying.transpose(1, 2), self.by_kind, out=self.to_reshard)
        if self.crossed:
            torch.mul(later.unsqueeze(-1), own.borders, out=self.by_border)
            torch.bmm(self.by_border, self.p2p.transpose(1, 2), out=self.to_leaving)
            self.to_leave[0].addcmul_(self.to_left, self.leave[2])
            self.to_leave[1].addcmul_(self.to_left, self.leave[1])
            if several:
                torch.bmm(self.leaving.transpose(1, 2), self.by_border, out=self.to_p2p)
        if several:
            self._layout_slopes()

    def _layout_slopes(self) -> None:
        """Slopes in the layouts' weights of the seconds between layers."""
        assert self.own.pairs is not None
        self.change_rows.copy_(self.returned)
        torch.mul(self.changed, self.reached, out=self.met)
        torch.sum(self.met, -2, out=self.to_after)
        torch.mul(self.changed, self.next_held, out=self.met)
        torch.bmm(self.met_rows, self.back, out=self.to_before)
        self.choices.to_held[0].copy_(self.to_before)
        self.choices.to_held[1].add_(self.to_after)


def of_own_kind(values: Tensor, kinds: Tensor) -> Tensor:
    """Every stage's value of its own kind, `(..., K)`, of values by kind `(..., K, Q)`."""
    return values.squeeze(-1) if values.shape[-1] == 1 else (values * kinds).sum(-1)
