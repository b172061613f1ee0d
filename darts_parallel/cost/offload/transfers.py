"""Seconds of tensors over the link between a device and its host's memory.

A device sends a share of the activations of a micro-batch to the host in its forward pass and fetches it in
its backward pass, beside the computation (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, section
5.1.2; PipeOffload, Wan et al. 2025, arXiv 2503.01328). A share of the optimizer state lies in host memory and
travels through the device in every step, in and out at once over a full-duplex link (ZeRO-Infinity, section
5.1.1); the device updates it, so that no seconds of the host's processor are needed. Shares are of whole
tensors: messages, and so latencies, grow with the share.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from darts_parallel.errors import UnsupportedError
from darts_parallel.problem.cluster import Cluster, Scalar, StageTopology

ACTIVATION, OPTIMIZER = range(2)
"""Columns of fractions."""


def offload_fields(
    offload: tuple[str, ...],
    cluster: Cluster,
    stages: Sequence[StageTopology],
    stacked: Callable[[str], Tensor],
) -> dict[str, Any]:
    """Return the fields of a `CostTable` whose plans may offload; none for others.

    Args:
        offload: What may be offloaded.
        cluster: Whose devices reach their host's memory.
        stages: Kinds of stage, Q.
        stacked: Gives a field of all `LayerCosts`, `(O, Q, L, C)`.

    Errors:
        UnsupportedError: a device has no known way to its host.
    """
    if not offload:
        return {}
    state = stacked("state")
    exponents = [cluster.groups[stage.group].device.overlap_exponent for stage in stages]
    return {
        "offload": offload,
        "host_transfer": host_seconds(cluster, stages, stacked("activation")),
        "state": state.amax(1),
        "state_transfer": host_seconds(cluster, stages, state),
        "overlap": torch.stack([torch.as_tensor(exponent) for exponent in exponents]).double(),
    }


def host_seconds(cluster: Cluster, stages: Sequence[StageTopology], numbers: Tensor) -> Tensor:
    """Seconds of bytes over the host links, one way.

    Args:
        cluster: Whose devices reach their host's memory.
        stages: Kinds of stage, Q.
        numbers: Bytes of every layer, each one message, `(O, Q, L, C)`.

    Errors:
        UnsupportedError: a device has no known way to its host.
    """
    links = [_host_link(cluster, stage) for stage in stages]
    bandwidth, latency = (torch.stack([torch.as_tensor(link[i]) for link in links]) for i in (0, 1))
    columns = (1, -1, 1, 1)
    return numbers / bandwidth.double().view(columns) + latency.double().view(columns) * (numbers > 0)


def _host_link(cluster: Cluster, stage: StageTopology) -> tuple[Scalar, Scalar]:
    """Bytes a second and latency of a device's way to its host; of several kinds the slowest."""
    devices = [cluster.groups[number].device for number in stage.groups]
    speeds = [float(torch.as_tensor(device.host_bandwidth).detach()) for device in devices]
    slowest = devices[speeds.index(min(speeds))]
    if not min(speeds):
        raise UnsupportedError(
            f"plan: it offloads, but cluster.devices.{slowest.name}.host_bandwidth_GBps is 0; try "
            "25, which a PCIe 4.0 x16 link reaches."
        )
    return slowest.host_bandwidth, slowest.host_latency
