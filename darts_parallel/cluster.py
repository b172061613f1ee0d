"""The cluster in SI units: devices, links, nodes in rank order, and which link a group crosses.

Every figure may be a float or a scalar tensor: with tensors, costs carry gradients to the hardware.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from darts_parallel.config import ClusterConfig, DeviceConfig, LinkConfig

Scalar = float | Tensor
GIB = 2.0**30


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: `latency` seconds and `bandwidth` bytes/s, one direction."""

    bandwidth: Scalar
    latency: Scalar
    shared: bool = False

    @staticmethod
    def from_config(config: LinkConfig) -> "Link":
        """Convert the units of the YAML keys."""
        bandwidth = config.bandwidth_GBps * 1e9 * config.efficiency
        return Link(bandwidth, config.latency_us * 1e-6, config.shared)


@dataclass(frozen=True)
class Device:
    """A GPU: bytes, FLOP/s, bytes/s, seconds."""

    name: str
    memory: float
    peak_flops: Scalar
    memory_bandwidth: Scalar
    gemm_efficiency: Scalar
    gemm_half_size: Scalar
    attention_efficiency: Scalar
    memory_efficiency: Scalar
    layer_overhead: Scalar
    overlap_exponent: Scalar
    reserved: float

    @staticmethod
    def from_config(name: str, config: DeviceConfig, precision: str) -> "Device":
        """Convert the units of the YAML keys and take the peak of `precision`."""
        return Device(
            name=name,
            memory=config.memory_GiB * GIB,
            peak_flops=config.peak_TFLOPs[precision] * 1e12,
            memory_bandwidth=config.memory_bandwidth_GBps * 1e9,
            gemm_efficiency=config.gemm_efficiency,
            gemm_half_size=config.gemm_half_size,
            attention_efficiency=config.attention_efficiency,
            memory_efficiency=config.memory_efficiency,
            layer_overhead=config.layer_overhead_us * 1e-6,
            overlap_exponent=config.overlap_exponent,
            reserved=config.reserved_GiB * GIB,
        )


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes that follow each other in rank order."""

    count: int
    gpus: int
    device: Device
    intra_node: Link
    price_per_hour: float | None


@dataclass(frozen=True)
class StageTopology:
    """Where the ranks of one pipeline stage lie; equal stages are equal keys of the cost table."""

    group: int
    """Index of the node group whose device and intra-node link the stage has."""
    gpus_per_node: int
    counts: tuple[int, ...]
    """GPUs of the stage on each node that it touches."""

    def data_parallel(self, tp: int) -> tuple[int, int]:
        """Ranks of a data-parallel group on one node, and nodes that the group crosses."""
        dp = sum(self.counts) // tp
        local = max(min(self.counts) // tp, 1)
        return local, -(-dp // local)


@dataclass(frozen=True)
class BoundaryTopology:
    """Which link carries activations between two stages, and how many GPUs of a node send at once."""

    group: int
    inside_node: bool
    senders: int


@dataclass(frozen=True)
class Cluster:
    """Node groups in rank order and the network between nodes."""

    name: str
    groups: tuple[NodeGroup, ...]
    inter_node: Link

    @staticmethod
    def from_config(config: ClusterConfig, precision: str) -> "Cluster":
        """SI units, one `Device` per name."""
        devices = {
            name: Device.from_config(name, config.devices[name], precision)
            for name in {group.device for group in config.nodes}
        }
        groups = tuple(
            NodeGroup(
                count=group.count,
                gpus=group.gpus,
                device=devices[group.device],
                intra_node=Link.from_config(group.intra_node),
                price_per_hour=group.price_per_hour_usd,
            )
            for group in config.nodes
        )
        return Cluster(config.name, groups, Link.from_config(config.inter_node))

    @cached_property
    def num_devices(self) -> int:
        """GPUs of all nodes."""
        return sum(group.count * group.gpus for group in self.groups)

    @cached_property
    def rank_nodes(self) -> tuple[tuple[int, int], ...]:
        """Node and node group of every rank."""
        places: list[tuple[int, int]] = []
        node = 0
        for index, group in enumerate(self.groups):
            for _ in range(group.count):
                places.extend([(node, index)] * group.gpus)
                node += 1
        return tuple(places)

    @property
    def tp_limit(self) -> int:
        """GPUs of the smallest node: tensor-parallel groups stay inside a node."""
        return min(group.gpus for group in self.groups)

    @property
    def homogeneous(self) -> bool:
        """All node groups have equal nodes."""
        first = self.groups[0]
        return all(
            (g.gpus, g.device, g.intra_node) == (first.gpus, first.device, first.intra_node)
            for g in self.groups
        )

    def stage_topology(self, stage: int, pp: int) -> StageTopology:
        """Topology of `stage` of `pp` equal stages of consecutive ranks (Megatron: pp slowest)."""
        places = self._places(stage, pp)
        counts = Counter(node for node, _ in places)
        group = places[0][1]
        return StageTopology(group, self.groups[group].gpus, tuple(counts.values()))

    def boundary_topology(self, stage: int, pp: int) -> BoundaryTopology:
        """Link between `stage` and the next one."""
        places, following = self._places(stage, pp), self._places(stage + 1, pp)
        group = places[0][1]
        inside = len({node for node, _ in places + following}) == 1
        senders = max(Counter(node for node, _ in places).values())
        return BoundaryTopology(group, inside, senders)

    def _places(self, stage: int, pp: int) -> tuple[tuple[int, int], ...]:
        size = self.num_devices // pp
        return self.rank_nodes[stage * size : (stage + 1) * size]
