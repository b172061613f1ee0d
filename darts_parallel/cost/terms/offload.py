"""Activations and optimizer state in host memory: transfer time over the host link, and bytes saved.

A device sends a share of the activations of a micro-batch to the host during its forward pass and
fetches it during its backward pass (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857,
section 5.1.2; PipeOffload, Wan et al. 2025, arXiv 2503.01328). A share of the optimizer state lies
in host memory and passes through the device in every step, in and out at once over a full-duplex
link (ZeRO-Infinity, section 5.1.1). The device updates it, so the host's processor costs no
seconds. With DeepSpeed the processors of a node update it (`host_update_s`), and the weights alone
come back; its gradients leave next to backward (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840,
section 4). Shares are of whole tensors: messages, and so latencies, grow with the share.
`host_memory.py` finds the smallest shares that fit.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.cost_table import CostTable, HostMemory
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.host_memory import OPTIMIZER, OffloadedPlans
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import CostTerm, PlanContribution
from darts_parallel.errors import Entries, UnsupportedError
from darts_parallel.plans import OuterSpace
from darts_parallel.problem import Scalar


class OffloadTerm(CostTerm):
    """Shares of activations and of optimizer state in host memory; it adds to plans, not to layers."""

    name = "offload"
    formulas: ClassVar = {
        "offload": (
            "activations to the host and back, next to forward and backward",
            "exposed part: Qiao et al. 2021, eq. 11",
        ),
        "offloaded optimizer state": (
            "- share in host memory",
            "arXiv 2104.07857, section 5.1",
        ),
        "offloaded activations": (
            "- share in host memory, + the largest layer's activations on their way",
            "arXiv 2104.07857, section 5.1",
        ),
    }

    def table_fields(
        self, space: OuterSpace, stages: Sequence[StageContext], costs: Callable[[str], Tensor]
    ) -> Entries:
        """Return the fields of a table whose plans may offload; none for others.

        Errors:
            UnsupportedError: a device has no known way to its host.
        """
        if not space.offload:
            return {}
        state = costs("state")
        shares = float_tensor(space.shares) if space.shares else None
        transfer = host_seconds(stages, costs("activation"))
        state_transfer = host_seconds(stages, state)
        if update := stages[0].software.host_update_s:
            held = stages[0].state
            parameters = state / held.optimizer
            gpus = _by_kind([float(stage.group.gpus) for stage in stages])
            weights = host_seconds(stages, held.parameter * parameters)
            state_transfer = weights + update * gpus * parameters
        overlap = _by_kind([stage.device.overlap_exponent for stage in stages]).flatten()
        host = HostMemory(
            kinds=space.offload,
            transfer=transfer,
            state=state.amax(1),
            state_transfer=state_transfer,
            overlap=overlap,
            fractions=shares,
        )
        return {"host": host}

    def plan_cost(self, table: CostTable, plans: HardPlans) -> PlanContribution | None:
        """Price plans that offload by the table's fractions, or by the least with which they fit."""
        if table.host is None:
            return None
        offloaded = OffloadedPlans(table, plans.outer, plans.choices, plans.stages(), table.host)
        shares = offloaded.fractions()
        forward, backward = offloaded.lengthening(shares)
        none = torch.zeros_like(shares)
        state = -shares[..., OPTIMIZER] * offloaded.state
        rest = offloaded.memory(shares) - offloaded.memory(none) - state
        memory = {"optimizer state": state, "activations": rest}
        update = offloaded.update(shares)
        return PlanContribution(self.name, forward, backward, update, memory)


def host_seconds(stages: Sequence[StageContext], sizes: Tensor) -> Tensor:
    """Return the seconds of bytes over the host links, one way, shape of `sizes`.

    Args:
        stages: Kinds of stage, Q.
        sizes: Bytes of every layer, each one message, `(O, Q, L, C)`.

    Errors:
        UnsupportedError: a device has no known way to its host.
    """
    links = [_host_link(stage) for stage in stages]
    bandwidth = _by_kind([bandwidth for bandwidth, _ in links])
    latency = _by_kind([latency for _, latency in links])
    return sizes / bandwidth + latency * (sizes > 0)


def _by_kind(values: list[Scalar]) -> Tensor:
    """Return a value of every kind of stage in the axes of a table, `(1, Q, 1, 1)`."""
    return torch.stack([torch.as_tensor(value) for value in values]).double().view(1, -1, 1, 1)


def _host_link(stage: StageContext) -> tuple[Scalar, Scalar]:
    """Return bandwidth and latency of a device's link to its host; the slowest of several kinds."""
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
