"""The least shares to offload with which hard plans fit, and what given shares cost.

For decided stages and strategies offloading only costs seconds, so the best share of one kind is the least
that fits: memory falls linearly with it, but for the largest layer, whose tensors are still on their way. Of
two kinds the cheaper mixture is found on the line on which the device is just full, where the device's own
seconds are convex in the share of activations (golden section).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.cost.compute import lengthening
from darts_parallel.cost.offload.transfers import ACTIVATION, OPTIMIZER
from darts_parallel.cost.table import CostTable

SECTIONS = 32
"""Golden sections: the share of activations is then known to 1e-6."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class OffloadedPlans:
    """What B hard plans hold and send; K stages, seconds and bytes."""

    table: CostTable
    static: Tensor
    """Of every device, `(B, pp)`; so all that follow with this shape."""
    state: Tensor
    """Optimizer state, part of `static`."""
    kept: Tensor
    """Activations of all micro-batches in flight."""
    state_seconds: Tensor
    """Seconds of all optimizer state over the host link."""
    activation: Tensor
    """Of every layer, one micro-batch, `(B, L)`."""
    working: Tensor
    """Of every layer, `(B, L)`."""
    device: Tensor
    """Of every layer, `(B, L)`."""
    transfer: Tensor
    """Seconds of the activations of every stage over the host link, `(B, K)`."""
    forward: Tensor
    """Seconds of every stage's layers forward, `(B, K)`."""
    backward: Tensor
    """The same backward."""
    counts: Tensor
    """Micro-batches, `(B,)`."""

    @staticmethod
    def of(table: CostTable, outer: Tensor, choices: Tensor, stages: Tensor) -> "OffloadedPlans":
        """Read plans from their table.

        Args:
            table: Costs, of plans that may offload.
            outer: Outer choices, `(B,)`.
            choices: Strategy of every layer, `(B, L)`.
            stages: Stage of every layer, `(B, L)`.
        """
        assert table.state is not None
        assert table.state_transfer is not None
        assert table.host_transfer is not None
        row, layers = outer.unsqueeze(1), torch.arange(table.num_layers)
        device, kinds = table.stage_device[stages], table.stage_kind[stages]
        activation = table.activation[row, layers, choices]

        def by_stage(values: Tensor) -> Tensor:
            return summed(values[row, kinds, layers, choices], stages, table.num_stages)

        return OffloadedPlans(
            table=table,
            static=summed(table.static[row, layers, choices], device, table.pp),
            state=summed(table.state[row, layers, choices], device, table.pp),
            kept=summed(table.in_flight[row, stages] * activation, device, table.pp),
            state_seconds=summed(table.state_transfer[row, kinds, layers, choices], device, table.pp),
            activation=activation,
            working=table.working[row, layers, choices],
            device=device,
            transfer=by_stage(table.host_transfer),
            forward=by_stage(table.forward),
            backward=by_stage(table.backward),
            counts=table.num_micro_batches[outer],
        )

    def memory(self, fractions: Tensor) -> Tensor:
        """Peak bytes of every device for fractions `(B, pp, 2)`, `(B, pp)`."""
        sent, away = fractions[..., ACTIVATION], fractions[..., OPTIMIZER]
        largest = self._largest(self.working + sent.gather(1, self.device) * self.activation)
        return self.static - away * self.state + (1.0 - sent) * self.kept + largest

    def lengthening(self, fractions: Tensor) -> tuple[Tensor, Tensor]:
        """Seconds by which transfers lengthen every stage's forward and backward, `(B, K)` each."""
        table = self.table
        sent = fractions[..., ACTIVATION][:, table.stage_device] * self.transfer
        assert table.overlap is not None
        exponent = table.overlap[table.stage_kind]
        return lengthening(self.forward, sent, exponent), lengthening(self.backward, sent, exponent)

    def update(self, fractions: Tensor) -> Tensor:
        """Seconds that every device's optimizer step takes longer, `(B, pp)`."""
        return fractions[..., OPTIMIZER] * self.state_seconds

    def fractions(self) -> Tensor:
        """The table's fractions, or the least with which plans fit, `(B, pp, 2)`."""
        given = self.table.fractions
        return self.least() if given is None else given.expand(len(self.static), -1, -1)

    @torch.no_grad()
    def least(self) -> Tensor:
        """The least fractions with which plans fit, `(B, pp, 2)`; where none do, those that need least."""
        kinds = self.table.offload
        none = torch.zeros_like(self.static)
        if "activation" not in kinds:
            return torch.stack([none, self._state_needed(none)], -1)
        most = self._activations_needed(self.static)
        if "optimizer" not in kinds:
            return torch.stack([most, none], -1)
        low, high = self._activations_needed(self.static - self.state), most
        for _ in range(SECTIONS):
            step = GOLDEN * (high - low)
            left, right = high - step, low + step
            better = self._seconds(left) <= self._seconds(right)
            low, high = torch.where(better, low, left), torch.where(better, right, high)
        # the ends of the line themselves: none of either kind where that is best
        points = torch.stack([self._activations_needed(self.static - self.state), (low + high) / 2, most])
        seconds = torch.stack([self._seconds(point) for point in points])
        best = points.gather(0, seconds.argmin(0, keepdim=True)).squeeze(0)
        return torch.stack([best, self._state_needed(best)], -1)

    def _largest(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.static).scatter_reduce(1, self.device, values, "amax")

    def _activations_needed(self, static: Tensor) -> Tensor:
        """The least share of activations with which every layer's turn fits, beside `static` bytes."""
        whole = (static + self.kept - self.table.capacity).gather(1, self.device) + self.working
        relief = self.kept.gather(1, self.device) - self.activation
        share = torch.where(relief > 0, whole / relief, torch.inf)
        return self._largest(torch.where(whole > 0, share, 0.0)).clamp(max=1.0)

    def _state_needed(self, sent: Tensor) -> Tensor:
        """The least share of optimizer state beside a share `sent` of activations, `(B, pp)`."""
        none = torch.zeros_like(sent)
        over = self.memory(torch.stack([sent, none], -1)) - self.table.capacity
        share = torch.where(self.state > 0, over / self.state, torch.inf)
        return torch.where(over > 0, share, 0.0).clamp(max=1.0)

    def _seconds(self, sent: Tensor) -> Tensor:
        """Seconds an iteration that a device spends on offloading, just full, `(B, pp)`."""
        fractions = torch.stack([sent, self._state_needed(sent)], -1)
        forward, backward = self.lengthening(fractions)
        longer = self.table.by_device(forward + backward)
        return self.counts.unsqueeze(1) * longer + self.update(fractions)


def summed(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Values `(B, N)` added up by their place, shape `(B, count)`."""
    zeros = torch.zeros(len(values), count, dtype=values.dtype)
    return zeros.scatter_add(1, places, values)
