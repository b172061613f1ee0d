"""Activations and optimizer state in host memory: seconds of their way, and the least shares that fit.

A device sends a share of the activations of a micro-batch to the host in its forward pass and fetches it in
its backward pass, next to the computation (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, section
5.1.2; PipeOffload, Wan et al. 2025, arXiv 2503.01328). A share of the optimizer state lies in host memory and
travels through the device in every step, in and out at once over a full-duplex link (ZeRO-Infinity, section
5.1.1); the device updates it, so that no seconds of the host's processor are needed. Shares are of whole
tensors: messages, and so latencies, grow with the share.

For decided stages and strategies offloading only costs seconds, so the best share of one kind is the least
that fits: memory falls linearly with it, but for the largest layer, whose tensors are still on their way. Of
two kinds the cheaper mixture is found on the line on which the device is just full, where the device's own
seconds are convex in the share of activations (golden section).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.compute import exposed
from darts_parallel.cost.pipeline import summed
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import CostTerm, PlanContribution
from darts_parallel.errors import UnsupportedError
from darts_parallel.plans import OuterSpace
from darts_parallel.problem import Scalar

if TYPE_CHECKING:
    from darts_parallel.cost.hard_plans import HardPlans
    from darts_parallel.cost.table import CostTable

ACTIVATION, OPTIMIZER = range(2)
"""Columns of fractions."""
SECTIONS = 32
"""Golden sections: the share of activations is then known to 1e-6."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class HostMemory:
    """Figures of a cost table whose plans may keep tensors in host memory; axes as in `CostTable`."""

    kinds: tuple[str, ...]
    """Tensors of which a share may lie there (`OFFLOADS`)."""
    transfer: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds of all activations of one micro-batch over the host link, one way."""
    state: Tensor = field(metadata={"axes": "OLC"})
    """Bytes of optimizer state, part of the table's `static`."""
    state_transfer: Tensor = field(metadata={"axes": "OQLC"})
    """Seconds of that state over the host link, in and out at once."""
    overlap: Tensor = field(metadata={"axes": "Q"})
    """Exponent of the overlap of transfers and computation."""
    fractions: Tensor | None = None
    """Shares of activations and of optimizer state in host memory, `(pp, 2)`; None: the least that fit."""


def without_offloadable_memory(table: "CostTable") -> "CostTable":
    """Return the optimistic copy without offloadable tensors: its bounds hold for any share of them."""
    if (host := table.host) is None:
        return table
    static = table.static - host.state if "optimizer" in host.kinds else table.static
    activation = table.activation * ("activation" not in host.kinds)
    return replace(table, static=static, activation=activation, host=None)


class OffloadTerm(CostTerm):
    """Shares of activations and of optimizer state in host memory; it adds to plans, not to layers."""

    name = "offload"
    formulas: ClassVar = {
        "offload": (
            "activations to the host and back, next to forward and backward",
            "exposed part: Qiao et al. 2021, eq. 11",
        ),
        "offloaded": (
            "- shares in host memory, + the largest layer's activations on their way",
            "arXiv 2104.07857, section 5.1",
        ),
    }

    def table_fields(
        self, space: OuterSpace, stages: Sequence[StageContext], costs: Callable[[str], Tensor]
    ) -> dict[str, Any]:
        """Return the fields of a table whose plans may offload; none for others.

        Errors:
            UnsupportedError: a device has no known way to its host.
        """
        if not space.offload:
            return {}
        state, exponents = costs("state"), [stage.device.overlap_exponent for stage in stages]
        host = HostMemory(
            kinds=space.offload,
            transfer=host_seconds(stages, costs("activation")),
            state=state.amax(1),
            state_transfer=host_seconds(stages, state),
            overlap=torch.stack([torch.as_tensor(exponent) for exponent in exponents]).double(),
            fractions=torch.tensor(space.shares, dtype=torch.float64) if space.shares else None,
        )
        return {"host": host}

    def plan_cost(self, table: "CostTable", plans: "HardPlans") -> PlanContribution | None:
        """Price plans that offload by the table's fractions, or by the least with which they fit."""
        if table.host is None:
            return None
        offloaded = OffloadedPlans.of(table, table.host, plans)
        shares = offloaded.fractions()
        forward, backward = offloaded.lengthening(shares)
        relief = offloaded.memory(shares) - offloaded.memory(torch.zeros_like(shares))
        return PlanContribution(
            self.name, "offloaded", forward, backward, offloaded.update(shares), relief
        )


@dataclass(frozen=True)
class OffloadedPlans:
    """Bytes that B hard plans of K stages hold, and seconds that they send."""

    table: "CostTable"
    host: HostMemory
    static: Tensor
    """Static bytes of every device, `(B, pp)`."""
    state: Tensor
    """Bytes of optimizer state of every device, part of `static`, `(B, pp)`."""
    kept: Tensor
    """Bytes of the activations of all micro-batches in flight on every device, `(B, pp)`."""
    state_seconds: Tensor
    """Seconds of all optimizer state of every device over the host link, `(B, pp)`."""
    activation: Tensor
    """Activation bytes of one micro-batch of every layer, `(B, L)`."""
    working: Tensor
    """Working bytes of every layer, `(B, L)`."""
    device: Tensor
    """Device of every layer, `(B, L)`."""
    transfer: Tensor
    """Seconds of the activations of every stage over the host link, `(B, K)`."""
    forward: Tensor
    """Seconds of every stage's layers forward, `(B, K)`."""
    backward: Tensor
    """Seconds of every stage's layers backward, `(B, K)`."""
    counts: Tensor
    """Micro-batches, `(B,)`."""

    @staticmethod
    def of(table: "CostTable", host: HostMemory, plans: "HardPlans") -> "OffloadedPlans":
        """Read plans from their table and what it knows of the host's memory."""
        row, layers = plans.outer.unsqueeze(1), torch.arange(table.num_layers)
        choices, stages = plans.choices, plans.stages()
        device, kinds = table.stage_device[stages], table.stage_kind[stages]
        activation = table.activation[row, layers, choices]

        def by_stage(values: Tensor) -> Tensor:
            return summed(values[row, kinds, layers, choices], stages, table.num_stages)

        return OffloadedPlans(
            table=table,
            host=host,
            static=summed(table.static[row, layers, choices], device, table.pp),
            state=summed(host.state[row, layers, choices], device, table.pp),
            kept=summed(table.in_flight[row, stages] * activation, device, table.pp),
            state_seconds=summed(
                host.state_transfer[row, kinds, layers, choices], device, table.pp
            ),
            activation=activation,
            working=table.working[row, layers, choices],
            device=device,
            transfer=by_stage(host.transfer),
            forward=by_stage(table.forward),
            backward=by_stage(table.backward),
            counts=table.num_micro_batches[plans.outer],
        )

    def memory(self, fractions: Tensor) -> Tensor:
        """Return the peak bytes of every device for fractions `(B, pp, 2)`, `(B, pp)`."""
        sent, away = fractions[..., ACTIVATION], fractions[..., OPTIMIZER]
        largest = self._largest(self.working + sent.gather(1, self.device) * self.activation)
        return self.static - away * self.state + (1.0 - sent) * self.kept + largest

    def lengthening(self, fractions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the seconds by which transfers lengthen forward and backward, `(B, K)` each."""
        return lengthening(
            self.table, self.host, fractions, self.transfer, (self.forward, self.backward)
        )

    def update(self, fractions: Tensor) -> Tensor:
        """Return the seconds that every device's optimizer step takes longer, `(B, pp)`."""
        return fractions[..., OPTIMIZER] * self.state_seconds

    def fractions(self) -> Tensor:
        """Return the table's fractions, or the least with which plans fit, `(B, pp, 2)`."""
        given = self.host.fractions
        return self.least() if given is None else given.expand(len(self.static), -1, -1)

    @torch.no_grad()
    def least(self) -> Tensor:
        """Return the least fractions with which plans fit, or that need least, `(B, pp, 2)`."""
        kinds, none = self.host.kinds, torch.zeros_like(self.static)
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
        points = torch.stack(
            [self._activations_needed(self.static - self.state), (low + high) / 2, most]
        )
        seconds = torch.stack([self._seconds(point) for point in points])
        best = points.gather(0, seconds.argmin(0, keepdim=True)).squeeze(0)
        return torch.stack([best, self._state_needed(best)], -1)

    def _largest(self, values: Tensor) -> Tensor:
        return torch.zeros_like(self.static).scatter_reduce(1, self.device, values, "amax")

    def _activations_needed(self, static: Tensor) -> Tensor:
        """Return the least share of activations with which every layer fits next to `static` bytes."""
        whole = (static + self.kept - self.table.capacity).gather(1, self.device) + self.working
        relief = self.kept.gather(1, self.device) - self.activation
        share = torch.where(relief > 0, whole / relief, torch.inf)
        return self._largest(torch.where(whole > 0, share, 0.0)).clamp(max=1.0)

    def _state_needed(self, sent: Tensor) -> Tensor:
        """Return the least share of optimizer state next to a share `sent` of activations, `(B, pp)`."""
        none = torch.zeros_like(sent)
        over = self.memory(torch.stack([sent, none], -1)) - self.table.capacity
        share = torch.where(self.state > 0, over / self.state, torch.inf)
        return torch.where(over > 0, share, 0.0).clamp(max=1.0)

    def _seconds(self, sent: Tensor) -> Tensor:
        """Return the seconds an iteration that a device spends on offloading, just full, `(B, pp)`."""
        fractions = torch.stack([sent, self._state_needed(sent)], -1)
        forward, backward = self.lengthening(fractions)
        longer = self.table.by_device(forward + backward)
        return self.counts.unsqueeze(1) * longer + self.update(fractions)


def offloaded_shares(table: "CostTable", plan: "HardPlans") -> tuple[tuple[float, float], ...]:
    """Return the shares that every device offloads of one plan; empty where there are none."""
    if table.host is None:
        return ()
    found = OffloadedPlans.of(table, table.host, plan).fractions()[0]
    return tuple((a, b) for a, b in found.tolist()) if bool((found > 0).any()) else ()


def lengthening(
    table: "CostTable",
    host: HostMemory,
    fractions: Tensor,
    transfer: Tensor,
    passes: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the seconds by which activations on their way lengthen forward and backward, `(..., K)` each.

    Args:
        fractions: Shares in host memory, `(..., pp, 2)`.
        transfer: Seconds of the activations of every stage over the host link, `(..., K)`.
        passes: Seconds of every stage's layers forward and backward, `(..., K)` each.
    """
    sent = fractions[..., ACTIVATION][..., table.stage_device] * transfer
    exponent = host.overlap[table.stage_kind]
    # a stage that no layer has any weight in divides nothing by zero
    forward, backward = (exposed(seconds.clamp(min=1e-30), sent, exponent) for seconds in passes)
    return forward, backward


def host_seconds(stages: Sequence[StageContext], numbers: Tensor) -> Tensor:
    """Return the seconds of bytes over the host links, one way.

    Args:
        stages: Kinds of stage, Q.
        numbers: Bytes of every layer, each one message, `(O, Q, L, C)`.

    Errors:
        UnsupportedError: a device has no known way to its host.
    """
    links = [_host_link(stage) for stage in stages]
    bandwidth, latency = (torch.stack([torch.as_tensor(link[i]) for link in links]) for i in (0, 1))
    columns = (1, -1, 1, 1)
    return numbers / bandwidth.double().view(columns) + latency.double().view(columns) * (
        numbers > 0
    )


def _host_link(stage: StageContext) -> tuple[Scalar, Scalar]:
    """Return bandwidth and latency of a device's link to its host; of several kinds the slowest."""
    devices = [stage.cluster.groups[number].device for number in stage.topology.groups]
    speeds = [float(torch.as_tensor(device.host_bandwidth).detach()) for device in devices]
    slowest = devices[speeds.index(min(speeds))]
    if not min(speeds):
        raise UnsupportedError(
            f"plan: it offloads, but cluster.devices.{slowest.name}.host_bandwidth_GBps is 0; try "
            "25, which a PCIe 4.0 x16 link reaches."
        )
    return slowest.host_bandwidth, slowest.host_latency


TERM = OffloadTerm()
