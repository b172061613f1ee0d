"""The cluster in SI units: devices, links, nodes in rank order, and which link a group crosses.

Every figure may be a float or a scalar tensor: with tensors, costs carry gradients to the hardware.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from torch import Tensor

from darts_parallel.config import NARROW, ClusterConfig, DeviceConfig, LinkConfig, NodeGroupConfig
from darts_parallel.errors import ConfigError, remembered
from darts_parallel.problem.software import COMMON, Software

Scalar = float | Tensor
GIB = 2.0**30
HOUR = 3600.0


def memory_unit(whole: Scalar) -> tuple[str, float]:
    """Return name and bytes of a unit for `whole` bytes: GiB, or MiB below 0.1 GiB."""
    return ("GiB", GIB) if whole >= 0.1 * GIB else ("MiB", 2.0**20)


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: `latency` seconds and `bandwidth` bytes/s, one direction."""

    bandwidth: Scalar
    latency: Scalar
    shared: bool = False
    peer_links: int = 0
    """Links that make up the bandwidth, each to one other GPU of the node; 0: a switch."""

    @staticmethod
    def from_config(config: LinkConfig) -> "Link":
        """Convert the units of the YAML keys."""
        bandwidth = config.bandwidth_GBps * 1e9 * config.efficiency
        return Link(bandwidth, config.latency_us * 1e-6, config.shared, config.peer_links)

    def towards(self, others: Tensor) -> Scalar:
        """Return the bytes/s of a GPU that sends to `others` GPUs of its node at once."""
        if not self.peer_links:
            return self.bandwidth
        # none is sent to where a group has one rank: any bandwidth does
        return self.bandwidth * (others.clamp(min=1.0) / self.peer_links).clamp(max=1.0)


MICROSECONDS = (
    "host_latency",
    "layer_overhead",
    "expert_overhead",
    "kernel_gap",
    "collective_start",
)
"""Fields of a device whose YAML keys are in microseconds."""


@dataclass(frozen=True)
class Device:
    """A GPU: bytes, FLOP/s, bytes/s, seconds."""

    name: str
    memory: float
    peak_flops: Scalar
    """FLOP/s in the precision of the job."""
    memory_bandwidth: Scalar
    gemm_efficiency: Scalar
    gemm_half_size: Scalar
    attention_efficiency: Scalar
    memory_efficiency: Scalar
    layer_overhead: Scalar
    overlap_exponent: Scalar
    reserved: float
    half_share: float = 1.0
    """FLOP/s of the products that training below 16 bits leaves in 16 bits, per `peak_flops`; else
    1."""
    eight_bit_share: float = 1.0
    """FLOP/s of 8-bit products per `peak_flops`, which under nvfp4 is that of 4 bits."""
    eight_bit: bool = False
    """The job trains in fp8, mxfp8 or nvfp4."""
    misaligned_efficiency: Scalar = 1.0
    fp8_efficiency: Scalar = 1.0
    """Share of `gemm_efficiency` that products below 16 bits reach of the peak of the job's
    precision."""
    streaming_factor: Scalar = 1.0
    divided_half_size: Scalar = 0.0
    kernel_gap: Scalar = 0.0
    """Seconds."""
    collective_start: Scalar = 0.0
    tp_hidden_share: Scalar = 0.0
    state_factor: Scalar = 1.0
    activation_factor: Scalar = 1.0
    grouped_gemm_efficiency: Scalar = 1.0
    all_to_all_efficiency: Scalar = 1.0
    host_bandwidth: Scalar = 0.0
    """To host memory and back, in each direction; 0: not known."""
    host_latency: Scalar = 0.0
    flex_gain: Scalar = 1.0
    permutation_factor: Scalar = 1.0
    expert_overhead: Scalar = 0.0

    @property
    def half_flops(self) -> Scalar:
        """FLOP/s of 16-bit products, and of all in training that has no narrower ones."""
        return self.peak_flops * self.half_share

    @property
    def speed(self) -> float:
        """FLOP/s that large products reach."""
        return _number(self.peak_flops) * _number(self.gemm_efficiency)

    @staticmethod
    def from_config(name: str, config: DeviceConfig, precision: str) -> "Device":
        """Convert the units of the YAML keys; peaks are those of `precision`."""
        peaks = config.peak_TFLOPs
        peak = peaks[precision]
        narrow = precision in NARROW
        half = peaks.get("bf16", peak) if narrow else peak
        shared = [key for key in Device.__dataclass_fields__ if hasattr(config, key)]
        figures = {key: getattr(config, key) for key in shared}
        figures["name"] = name
        figures["peak_flops"] = peak * 1e12
        figures["half_share"] = half / peak
        figures["eight_bit_share"] = peaks.get("fp8", peak) / peak
        figures["eight_bit"] = narrow
        figures["fp8_efficiency"] = getattr(config, f"{precision}_efficiency") if narrow else 1.0
        figures["memory"] = config.memory_GiB * GIB
        figures["reserved"] = config.kept_gib * GIB
        for key in ("memory_bandwidth", "host_bandwidth"):
            figures[key] = getattr(config, f"{key}_GBps") * 1e9
        for key in MICROSECONDS:
            figures[key] = getattr(config, f"{key}_us") * 1e-6
        return Device(**figures)


@dataclass(frozen=True)
class Failures:
    """How often GPUs fail, and how a job comes back: seconds, bytes, bytes/s."""

    gpu_mtbf: float
    write_bandwidth: float
    """Bytes/s of all GPUs together."""
    checkpoint: float | None
    """Bytes of a checkpoint; None: weights and optimizer state."""
    restart: float
    repair: float
    spare_nodes: int

    @staticmethod
    def from_config(config: ClusterConfig) -> "Failures | None":
        """Convert the units of the YAML keys; None where failures are not considered."""
        if config.mtbf_hours_per_gpu is None or config.checkpoint_GBps is None:
            return None
        checkpoint = None if config.checkpoint_GB is None else config.checkpoint_GB * 1e9
        mtbf = config.mtbf_hours_per_gpu * HOUR
        bandwidth = config.checkpoint_GBps * 1e9
        restart = config.restart_minutes * 60.0
        repair = config.repair_hours * HOUR
        return Failures(mtbf, bandwidth, checkpoint, restart, repair, config.spare_nodes)


def domain_nodes(count: int, most: int) -> int:
    """Return the nodes that a job takes of every NVLink domain.

    A job that needs several domains takes equally many nodes of each where that leaves none of them
    less than half full, as schedulers place it (256 GPUs on racks of 72: four times 64); else it
    fills them.

    Args:
        most: Nodes of a whole domain; 0 and 1: every node is its own.
    """
    if most <= 1:
        return 1
    fewest = -(-count // most)
    even = next(n for n in range(fewest, count + 1) if count % n == 0)
    return count // even if 2 * (count // even) >= min(most, count) else most


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes that follow each other in rank order.

    `inter_node` is the link out of each of these nodes where it differs from the cluster's;
    `intra_node` joins `domain_nodes` neighbouring nodes (an NVLink domain; 1: a node of its own).
    """

    count: int
    gpus: int
    device: Device
    intra_node: Link
    price_per_hour: float | None
    inter_node: Link | None = None
    domain_nodes: int = 1

    @staticmethod
    def from_config(
        config: NodeGroupConfig, device: Device, domain_gpus: int | None
    ) -> "NodeGroup":
        """Convert the units of the YAML keys.

        Args:
            domain_gpus: GPUs of an NVLink domain of the cluster, where the group names none.
        """
        gpus = config.nvlink_domain_gpus or domain_gpus or 1
        nodes = domain_nodes(config.count, gpus // config.gpus)
        link = Link.from_config(config.intra_node)
        outside = Link.from_config(config.inter_node) if config.inter_node else None
        price = config.price_per_hour_usd
        return NodeGroup(config.count, config.gpus, device, link, price, outside, nodes)

    @property
    def node(self) -> tuple[int, Device, Link, Link | None, int]:
        """Figures that equal nodes share; neither their number nor their price is among them."""
        return self.gpus, self.device, self.intra_node, self.inter_node, self.domain_nodes


def _number(value: Scalar) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


Types = tuple[int, ...]
"""Node types, each as its first node group."""
NodeOrder = tuple[int, ...]
"""Nodes as they follow each other along the pipeline; empty: in rank order.

A node that is named several times divides its GPUs equally among its places."""


@dataclass(frozen=True)
class StageTopology:
    """Where the ranks of one pipeline stage lie; equal stages are equal keys of the cost table."""

    group: int
    """Index of the node group whose device the stage has; of several, that of the slowest
    device."""
    gpus_per_node: int
    counts: tuple[int, ...]
    """GPUs of the stage on each node that it touches."""
    domains: tuple[int, ...]
    """GPUs of the stage in each NVLink domain that it touches; `counts` where every node is its
    own."""
    gpus_per_domain: int
    """GPUs of a whole domain of its node group."""
    groups: tuple[int, ...]
    """All node groups that the stage touches: one, but for a given plan that mixes node types."""

    def tensor_parallel(self, tp: int) -> tuple[int, int]:
        """Return a tensor-parallel group's ranks in one NVLink domain, and the domains it crosses.

        A group larger than a domain takes the largest equal share of each.
        """
        local = tp if tp <= self.gpus_per_domain else gcd(tp, self.gpus_per_domain)
        return local, tp // local

    def data_parallel(self, tp: int) -> tuple[int, int]:
        """Return a data-parallel group's ranks in one NVLink domain, and the domains it crosses."""
        dp = sum(self.domains) // tp
        local = max(min(self.domains) // tp, 1)
        return local, -(-dp // local)


@dataclass(frozen=True)
class BoundaryTopology:
    """Which links carry activations between two stages, and how many GPUs of a node share each."""

    group: int
    inside_node: bool
    """Each GPU sends inside one NVLink domain (one node, where it has none beyond itself)."""
    senders: int
    """GPUs of one node of the earlier stage, or of all stages where every node has part of each: all
    send at once; the node group is `group`."""
    next_group: int
    receivers: int
    """GPUs of one node of the later stage; its node group is `next_group`."""


@dataclass(frozen=True)
class Cluster:
    """Node groups in rank order, the network between nodes, and the order of nodes."""

    name: str
    groups: tuple[NodeGroup, ...]
    inter_node: Link
    node_order: NodeOrder = ()
    """Nodes, numbered in rank order, as they follow each other along the pipeline; empty: in rank
    order."""
    failures: Failures | None = None
    """None: not considered."""

    @staticmethod
    def from_config(
        config: ClusterConfig, precision: str, software: Software = COMMON
    ) -> "Cluster":
        """Convert to SI units: one `Device` per name, with the efficiencies of a framework.

        Errors:
            ConfigError: its figures hold for another framework.
        """
        if config.runs and (config.runs_of or "") != software.name:
            raise ConfigError(
                f"training.software={software.name or 'null'} has no part in the figures of "
                f"cluster={config.name}; try training.software={config.runs_of or 'null'}."
            )
        devices = {}
        for name in config.used_devices:
            own = config.devices[name]
            if not config.runs:
                own = software.on(name, own)
            devices[name] = Device.from_config(name, own, precision)
        groups = tuple(
            NodeGroup.from_config(group, devices[group.device], config.nvlink_domain_gpus)
            for group in config.nodes
        )
        network = Link.from_config(config.inter_node)
        return Cluster(config.name, groups, network, failures=Failures.from_config(config))

    @cached_property
    def num_devices(self) -> int:
        """GPUs of all nodes."""
        return sum(group.count * group.gpus for group in self.groups)

    def arranged(self, node_order: NodeOrder) -> "Cluster":
        """Put the nodes in another order along the pipeline."""
        return self if node_order == self.node_order else replace(self, node_order=node_order)

    def with_devices(self, change: Callable[[Device], Device]) -> "Cluster":
        """Return the cluster with changed devices in all node groups."""
        return replace(self, groups=tuple(replace(g, device=change(g.device)) for g in self.groups))

    @cached_property
    def types(self) -> Types:
        """Node types, as the first node group of each. Groups of equal nodes are one type."""
        return tuple(sorted(set(self.node_types)))

    @cached_property
    def node_types(self) -> Types:
        """Type of every node, in rank order."""
        nodes = [group.node for group in self.groups]
        return tuple(nodes.index(group.node) for group in self.groups for _ in range(group.count))

    @cached_property
    def node_domains(self) -> tuple[int, ...]:
        """NVLink domain of every node, in rank order; a group fills its domains one by one."""
        domains = []
        first = 0
        for group in self.groups:
            domains += [first + node // group.domain_nodes for node in range(group.count)]
            first = domains[-1] + 1 if domains else 0
        return tuple(domains)

    @cached_property
    def rank_nodes(self) -> tuple[tuple[int, int], ...]:
        """Node and node type of every device, in the order of the pipeline."""
        types = self.node_types
        order = self.node_order or range(len(types))
        return tuple(
            (node, types[node])
            for node in order
            for _ in range(self.groups[types[node]].gpus // self.visits)
        )

    @cached_property
    def visits(self) -> int:
        """Places of a node in the order of the pipeline."""
        return max(len(self.node_order) // len(self.node_types), 1)

    @cached_property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Ranks in the order of the pipeline: the place of every device of `rank_nodes`."""
        if not self.node_order:
            return tuple(range(self.num_devices))
        ranks = []
        first = 0
        for kind in self.node_types:
            ranks.append(iter(range(first, first + self.groups[kind].gpus)))
            first += self.groups[kind].gpus
        return tuple(next(ranks[node]) for node, _ in self.rank_nodes)

    @cached_property
    def type_devices(self) -> dict[int, int]:
        """GPUs of every node type."""
        return {
            kind: count * self.groups[kind].gpus for kind, count in Counter(self.node_types).items()
        }

    def nic(self, group: int) -> Link:
        """Return the link out of a node of a group."""
        return self.groups[group].inter_node or self.inter_node

    @cached_property
    def one_domain(self) -> bool:
        """All devices reach each other by the intra-node link."""
        return len(set(self.node_domains)) == 1

    @property
    def homogeneous(self) -> bool:
        """All node groups have equal nodes."""
        return len(self.types) == 1

    def stages_are_pure(self, pp: int) -> bool:
        """Return whether none of `pp` equal stages mixes node types, in this order of nodes."""
        mixed = ({kind for _, kind in self._places(stage, pp)} for stage in range(pp))
        return self.homogeneous or all(len(kinds) == 1 for kinds in mixed)

    @remembered
    def stage_topology(self, stage: int, pp: int) -> StageTopology:
        """Return the topology of one of `pp` equal stages of consecutive ranks (as Megatron-LM).

        It is counted GPU by GPU.
        """
        places = self._places(stage, pp)
        counts = Counter(node for node, _ in places)
        domains = Counter(self.node_domains[node] for node, _ in places)
        kinds = tuple(sorted({kind for _, kind in places}))
        slowest = min(kinds, key=lambda kind: self.groups[kind].device.speed)
        group = self.groups[slowest]
        return StageTopology(
            slowest,
            group.gpus,
            tuple(counts.values()),
            tuple(domains.values()),
            group.gpus * group.domain_nodes,
            kinds,
        )

    def stage_links(self, stage: StageTopology) -> tuple[Link, Link]:
        """Return the slowest links inside and between the nodes of a stage."""
        inside = (self.groups[kind].intra_node for kind in stage.groups)
        between = (self.nic(kind) for kind in stage.groups)
        slowest, last = (
            min(links, key=lambda link: _number(link.bandwidth)) for links in (inside, between)
        )
        return slowest, last

    def boundary_topology(self, stage: int, pp: int) -> BoundaryTopology:
        """Return the link between `stage` and the next; behind the last comes the first."""
        places = self._places(stage, pp)
        following = self._places((stage + 1) % pp, pp)
        sending, receiving = (
            [self.node_domains[node] for node, _ in part] for part in (places, following)
        )
        inside = sending == receiving
        senders, receivers = (
            max(Counter(node for node, _ in part).values()) for part in (places, following)
        )
        senders *= self.visits
        return BoundaryTopology(places[0][1], inside, senders, following[0][1], receivers)

    def stage_group(self, stage: int, pp: int) -> NodeGroup:
        """Return the slowest node group of a stage, whose device, links and price it has."""
        return self.groups[self.stage_topology(stage, pp).group]

    def stage_devices(self, pp: int) -> list[Device]:
        """Return the device of each of `pp` equal stages."""
        return [self.stage_group(stage, pp).device for stage in range(pp)]

    def _places(self, stage: int, pp: int) -> tuple[tuple[int, int], ...]:
        size = self.num_devices // pp
        return self.rank_nodes[stage * size : (stage + 1) * size]
