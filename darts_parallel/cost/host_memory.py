"""Hard plans that keep activations and optimizer state in host memory: bytes, seconds, least shares.

For given stages and strategies offloading only costs seconds. The best share of one kind of tensor
is then the least share that fits: memory falls linearly with the share, except for the largest
layer, whose activations are still in transfer.

With both kinds the cheapest mixture lies on the line on which the device is just full. There the
device's seconds are convex in the share of activations, and golden sections find the minimum. An
iteration waits for the slowest device alone: `gradient/host_shares.py` chooses all shares together.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.cost.choices import BothPasses
from darts_parallel.cost.compute import exposed
from darts_parallel.cost.cost_table import CostTable, HostMemory
from darts_parallel.cost.plan_places import PlanPlaces
from darts_parallel.cost.rows import flatnonzero
from darts_parallel.cost.stage_costs import kept_bytes, largest_by_device

ACTIVATION, OPTIMIZER = range(2)
"""Columns of fractions."""
SECTIONS = 32
"""Golden sections: they determine the share of activations to 1e-6."""
GOLDEN = (5**0.5 - 1) / 2
LEAST_SECONDS = 1e-30
"""Floor of a stage's seconds: a stage without layers must not divide by zero."""


def without_offloadable_memory(table: CostTable) -> CostTable:
    """Return the optimistic copy without offloadable tensors: its bounds hold for any share of them.

    Own terms of the user's are left out, too; the bounds then hold if these are not negative.
    """
    table = replace(table, own=None)
    host = table.host
    if host is None:
        return table
    static = table.static - host.state if "optimizer" in host.kinds else table.static
    activation = table.activation * ("activation" not in host.kinds)
    return replace(table, static=static, activation=activation, host=None)


def lengthening(
    table: CostTable,
    host: HostMemory,
    fractions: Tensor,
    transfer: Tensor,
    passes: BothPasses,
) -> BothPasses:
    """Return the seconds by which transfers lengthen forward and backward, `(..., K)` each.

    Args:
        fractions: Shares in host memory, `(..., pp, 2)`.
        transfer: Seconds of the activations of every stage over the host link, `(..., K)`.
        passes: Seconds of every stage's layers forward and backward, `(..., K)` each.
    """
    sent = fractions[..., ACTIVATION][..., table.stage_device] * transfer
    exponent = host.overlap[table.stage_kind]
    forward, backward = (seconds.clamp(min=LEAST_SECONDS) for seconds in passes)
    return exposed(forward, sent, exponent), exposed(backward, sent, exponent)


@dataclass(frozen=True)
class OffloadedPlans(PlanPlaces):
    """Bytes that B hard plans of K stages hold, and seconds of their transfers."""

    host: HostMemory

    @cached_property
    def static(self) -> Tensor:
        """Static bytes of every device, `(B, pp)`."""
        return self.by_device(self.read(self.table.static))

    @cached_property
    def state(self) -> Tensor:
        """Bytes of optimizer state of every device, part of `static`, `(B, pp)`."""
        return self.by_device(self.read(self.host.state))

    @cached_property
    def activation(self) -> Tensor:
        """Activation bytes of one micro-batch of every layer, `(B, L)`."""
        return self.read(self.table.activation)

    @cached_property
    def working(self) -> Tensor:
        """Working bytes of every layer, `(B, L)`."""
        return self.read(self.table.working)

    @cached_property
    def flying(self) -> Tensor:
        """Bytes of the activations of all micro-batches in flight on every device, `(B, pp)`."""
        return self.by_device(self.in_flight * self.activation)

    @cached_property
    def state_seconds(self) -> Tensor:
        """Seconds of all optimizer state of every device over the host link, `(B, pp)`."""
        return self.by_device(self.read_by_kind(self.host.state_transfer))

    @cached_property
    def transfer(self) -> Tensor:
        """Seconds of the activations of every stage over the host link, `(B, K)`."""
        return self.by_stage(self.read_by_kind(self.host.transfer))

    @cached_property
    def passes(self) -> BothPasses:
        """Seconds of every stage's layers forward and backward, `(B, K)` each."""
        forward = self.by_stage(self.read_by_kind(self.table.forward))
        return forward, self.by_stage(self.read_by_kind(self.table.backward))

    def memory(self, fractions: Tensor) -> Tensor:
        """Return the peak bytes of every device for fractions `(B, pp, 2)`, `(B, pp)`."""
        sent = fractions[..., ACTIVATION]
        static = self.static - fractions[..., OPTIMIZER] * self.state
        # activations of a layer at work are in device memory, even if they are offloaded
        working = self.working + sent.gather(1, self.devices) * self.activation
        return kept_bytes(static, self.flying, 1.0 - sent) + self._largest(working)

    def lengthening(self, fractions: Tensor) -> BothPasses:
        """Return the seconds by which transfers lengthen forward and backward, `(B, K)` each."""
        return lengthening(self.table, self.host, fractions, self.transfer, self.passes)

    def update(self, fractions: Tensor) -> Tensor:
        """Return the seconds by which transfers lengthen every device's optimizer step, `(B, pp)`."""
        return fractions[..., OPTIMIZER] * self.state_seconds

    def fractions(self) -> Tensor:
        """Return the table's fractions, or the least with which plans fit, `(B, pp, 2)`."""
        given = self.host.fractions
        return self.least() if given is None else given.expand(len(self.static), -1, -1)

    @torch.no_grad()
    def least(self) -> Tensor:
        """Return the least fractions with which plans fit, or that need least, `(B, pp, 2)`."""
        kinds = self.host.kinds
        none = torch.zeros_like(self.static)
        if "activation" not in kinds:
            return torch.stack([none, self._state_needed(none)], -1)
        most = self._activations_needed(self.static)
        if "optimizer" not in kinds:
            return torch.stack([most, none], -1)
        fewest = self._activations_needed(self.static - self.state)
        best = most.clone()
        undecided = flatnonzero((fewest < most).any(1))  # the others have no choice
        if len(undecided):
            part = replace(
                self,
                outer=self.outer[undecided],
                choices=self.choices[undecided],
                stages=self.stages[undecided],
            )
            low = fewest[undecided]
            high = most[undecided]
            # the minimum may lie at an end: no share of one of the kinds
            points = torch.stack([low, part._golden_section(low, high), high])
            seconds = torch.stack([part._seconds(point) for point in points])
            best[undecided] = points.gather(0, seconds.argmin(0, keepdim=True)).squeeze(0)
        return torch.stack([best, self._state_needed(best)], -1)

    def _golden_section(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the share of activations in [low, high] of least seconds, `(B, pp)`."""
        step = GOLDEN * (high - low)
        left = high - step
        right = low + step
        left_seconds = self._seconds(left)
        right_seconds = self._seconds(right)
        for _ in range(SECTIONS):
            better = left_seconds <= right_seconds
            low = torch.where(better, low, left)
            high = torch.where(better, right, high)
            step = GOLDEN * (high - low)
            # the other inner point is one of the last two
            point = torch.where(better, high - step, low + step)
            seconds = self._seconds(point)
            left, right = torch.where(better, point, right), torch.where(better, left, point)
            left_seconds, right_seconds = (
                torch.where(better, seconds, right_seconds),
                torch.where(better, left_seconds, seconds),
            )
        return (low + high) / 2

    def _largest(self, values: Tensor) -> Tensor:
        return largest_by_device(values, self.devices, self.table.pp)

    def _activations_needed(self, static: Tensor) -> Tensor:
        """Return the least share of activations with which every layer fits next to `static` bytes."""
        excess = (static + self.flying - self.table.capacity).gather(1, self.devices)
        excess = excess + self.working
        relief = self.flying.gather(1, self.devices) - self.activation
        share = torch.where(relief > 0, excess / relief, torch.inf)
        return self._largest(torch.where(excess > 0, share, 0.0)).clamp(max=1.0)

    def _state_needed(self, sent: Tensor) -> Tensor:
        """Return the least share of optimizer state next to a share `sent` of activations, `(B, pp)`."""
        none = torch.zeros_like(sent)
        excess = self.memory(torch.stack([sent, none], -1)) - self.table.capacity
        return torch.where(excess > 0, excess / self.state, 0.0).clamp(max=1.0)

    def _seconds(self, sent: Tensor) -> Tensor:
        """Return the seconds an iteration that a just full device spends on offloading, `(B, pp)`."""
        fractions = torch.stack([sent, self._state_needed(sent)], -1)
        forward, backward = self.lengthening(fractions)
        extra_seconds = self.table.by_device(forward + backward)
        counts = self.table.num_micro_batches[self.outer]
        return counts.unsqueeze(1) * extra_seconds + self.update(fractions)
