"""Schema of the cluster's YAML: node groups, links and devices. Units stand in the keys."""

from dataclasses import dataclass

from omegaconf import MISSING

from darts_parallel.config.checks import (
    require_at_least,
    require_at_most,
    require_member,
    require_size,
    require_within,
)
from darts_parallel.errors import ConfigError

PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4")
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose weight products run below 16 bits; all else stays in 16 bits."""
MAX_NODES = 2**17
MAX_GPUS_PER_NODE = 2**10
MAX_PRICE = 1e6
"""Dollars an hour of one node."""
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "memory_GiB": (1e-4, 1e5),
    "memory_bandwidth_GBps": (1e-3, 1e6),
    "gemm_efficiency": (1e-3, 1.0),
    "gemm_half_size": (0.0, 1e5),
    "misaligned_efficiency": (1e-3, 1.0),
    "fp8_efficiency": (1e-3, 1.0),
    "mxfp8_efficiency": (1e-3, 1.0),
    "nvfp4_efficiency": (1e-3, 1.0),
    "grouped_gemm_efficiency": (1e-3, 1.0),
    "all_to_all_efficiency": (1e-3, 1.0),
    "flex_gain": (1e-2, 1e2),
    "permutation_factor": (1e-2, 1e2),
    "expert_overhead_us": (0.0, 1e7),
    "attention_efficiency": (1e-3, 1.0),
    "memory_efficiency": (1e-3, 1.0),
    "streaming_factor": (1e-2, 1e2),
    "layer_overhead_us": (0.0, 1e7),
    "overlap_exponent": (1.0, 64.0),
    "reserved_GiB": (0.0, 1e5),
    "state_factor": (1e-2, 1e2),
    "activation_factor": (1e-2, 1e2),
    "host_bandwidth_GBps": (0.0, 1e6),
    "host_latency_us": (0.0, 1e7),
}
"""Least and most of each figure of a device, from a microcontroller to what no data sheet promises."""
PEAKS = (1e-6, 1e6)
"""TFLOP/s."""


@dataclass
class LinkConfig:
    """A link by the alpha-beta model."""

    bandwidth_GBps: float = MISSING
    """10^9 bytes a second, one direction: per GPU inside a node, per node between nodes."""
    latency_us: float = MISSING
    efficiency: float = 1.0
    """Share of the bandwidth that a large message reaches."""
    shared: bool = False
    """The GPUs of a node share this one link (PCIe host bridge) instead of a port each (NVSwitch)."""
    peer_links: int = 0
    """Links of a GPU that together have this bandwidth, each to one other GPU of its node (MI300X: 7), so
    that a message to one of them has its share of it; 0: all of it goes to any GPU."""

    def check(self, key: str) -> None:
        """Refuse what breaks a rule.

        Args:
            key: Where the link stands in the configuration.
        """
        require_at_least(f"{key}.bandwidth_GBps", self.bandwidth_GBps, 0, strict=True)
        require_at_least(f"{key}.latency_us", self.latency_us, 0)
        require_at_least(f"{key}.efficiency", self.efficiency, 0, strict=True)
        require_at_most(f"{key}.efficiency", self.efficiency, 1)
        require_within(f"{key}.efficiency", self.efficiency, 1e-3, 1)
        require_within(f"{key}.bandwidth_GBps", self.bandwidth_GBps, 1e-5, 1e6)
        require_within(f"{key}.latency_us", self.latency_us, 0, 1e8)
        require_within(f"{key}.peer_links", self.peer_links, 0, 1024)
        if self.shared and self.peer_links:
            raise ConfigError(
                f"{key}.peer_links={self.peer_links} must be 0 where shared=true, since all GPUs of a "
                "node then have one link; try 0."
            )


@dataclass
class NodeGroupConfig:
    """Equal nodes, consecutive in rank order."""

    count: int = MISSING
    gpus: int = MISSING
    device: str = MISSING
    intra_node: LinkConfig = MISSING
    price_per_hour_usd: float | None = None
    """Dollars an hour of one node."""
    inter_node: LinkConfig | None = None
    """The link out of each of these nodes where it is not the cluster's `inter_node`."""
    nvlink_domain_gpus: int | None = None
    """GPUs of neighbouring nodes that the intra-node link joins; null: the cluster's, else one node's."""

    def check(self, key: str, devices: tuple[str, ...]) -> None:
        """Refuse what breaks a rule.

        Args:
            key: Where the group stands, e.g. `cluster.nodes[0]`.
            devices: Names that the cluster defines.
        """
        require_size(f"{key}.count", self.count, MAX_NODES)
        require_size(f"{key}.gpus", self.gpus, MAX_GPUS_PER_NODE)
        if self.price_per_hour_usd is not None:
            require_at_least(f"{key}.price_per_hour_usd", self.price_per_hour_usd, 0)
            require_at_most(f"{key}.price_per_hour_usd", self.price_per_hour_usd, MAX_PRICE)
        require_member(f"{key}.device", self.device, devices)
        self.intra_node.check(f"{key}.intra_node")
        if self.inter_node is not None:
            self.inter_node.check(f"{key}.inter_node")
        if self.nvlink_domain_gpus is not None:
            require_domain(f"{key}.nvlink_domain_gpus", self.nvlink_domain_gpus, self)


def require_domain(key: str, domain: int, group: NodeGroupConfig) -> None:
    """Refuse an NVLink domain that is not made of whole nodes, each GPU with a port of its own.

    Args:
        domain: GPUs of the domain.
        group: The nodes that it joins.
    """
    require_size(key, domain, MAX_NODES * MAX_GPUS_PER_NODE)
    if domain % group.gpus:
        near = max(round(domain / group.gpus), 1) * group.gpus
        raise ConfigError(
            f"{key}={domain} must be a multiple of the {group.gpus} GPUs of a node; try {near}."
        )
    if domain > group.gpus and group.intra_node.shared:
        raise ConfigError(
            f"{key}={domain} must be one node where intra_node.shared=true, since a domain of several nodes "
            f"gives every GPU a port of its own; try {group.gpus}."
        )


@dataclass
class DeviceConfig:
    """A GPU: its data sheet, and the shares of it that real kernels reach.

    The defaults are those of a GPU and a software without measured runs (experiments/calibrate.py).
    """

    memory_GiB: float = MISSING
    peak_TFLOPs: dict[str, float] = MISSING
    memory_bandwidth_GBps: float = MISSING
    gemm_efficiency: float = 0.65
    """Share of the peak that a large matrix product reaches."""
    gemm_half_size: float = 130.0
    """Rows or columns at which a matrix product reaches half of that (its small-shape penalty)."""
    misaligned_efficiency: float = 0.87
    """Share of that speed where a side of the product is no multiple of 64 elements (128 bytes)."""
    fp8_efficiency: float = 0.82
    """Share of `gemm_efficiency` that fp8 products reach of the fp8 peak."""
    mxfp8_efficiency: float = 0.75
    """Share of `gemm_efficiency` that mxfp8 products reach of their peak; blocks are scaled in the cast."""
    nvfp4_efficiency: float = 0.5
    """Share of `gemm_efficiency` that nvfp4 products reach of their peak."""
    attention_efficiency: float = 0.4
    """Share of the peak that fused attention (FlashAttention) with large heads reaches."""
    memory_efficiency: float = 0.86
    """Share of the memory bandwidth that streaming kernels reach."""
    streaming_factor: float = 1.2
    """Memory traffic of element-wise kernels against that of fused ones; eager PyTorch is above 1."""
    layer_overhead_us: float = 350.0
    """Launch and framework overhead of one layer's forward pass (twice that in backward)."""
    tp_hidden_share: float = 0.1
    """Share of the tensor-parallel communication that runs next to the products (asynchronous tp)."""
    overlap_exponent: float = 1.6
    """g of T = (a^g + b^g)^(1/g) for communication next to compute (Pollux); 1: no overlap."""
    reserved_GiB: float = 4.4
    """CUDA context and communication buffers."""
    state_factor: float = 1.15
    """Bytes of parameters, gradients and optimizer state that the software holds, per byte of the formula:
    copies of the optimizer step, flat buffers, fragmentation."""
    activation_factor: float = 1.12
    """Bytes of kept activations per byte of the formula: unfused kernels keep more, the allocator wastes."""
    grouped_gemm_efficiency: float = 0.9
    """Share of the speed of single products that the grouped products of experts reach."""
    all_to_all_efficiency: float = 0.7
    """Share of the links' bandwidth that the experts' all-to-all reaches."""
    host_bandwidth_GBps: float = 0.0
    """Bandwidth that copies between one GPU and host memory reach in each direction, both at once; 0:
    not known, and nothing can be offloaded (`space.offload`)."""
    host_latency_us: float = 10.0
    """Latency of one such copy."""
    flex_gain: float = 1.25
    """Bandwidth of DeepEP and HybridEP (`training.moe_token_dispatcher_type=flex`) per that of a plain
    all-to-all."""
    permutation_factor: float = 1.0
    """Memory traffic of router and permutation against that of fused kernels."""
    expert_overhead_us: float = 0.0
    """Launch and synchronisation overhead of one layer's experts in the forward pass (twice in backward)."""

    def __post_init__(self) -> None:
        require_at_least("cluster.devices.*.memory_GiB", self.memory_GiB, 0, strict=True)
        for key in ("memory_bandwidth_GBps", "gemm_efficiency", "attention_efficiency"):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0, strict=True)
        require_at_least("cluster.devices.*.memory_efficiency", self.memory_efficiency, 0, strict=True)
        narrow = ("fp8_efficiency", "mxfp8_efficiency", "nvfp4_efficiency")
        experts = ("grouped_gemm_efficiency", "all_to_all_efficiency")
        for key in ("misaligned_efficiency", *narrow, *experts):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0, strict=True)
            require_at_most(f"cluster.devices.*.{key}", getattr(self, key), 1)
        for key in (
            "streaming_factor",
            "state_factor",
            "activation_factor",
            "flex_gain",
            "permutation_factor",
        ):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0, strict=True)
        require_at_least("cluster.devices.*.tp_hidden_share", self.tp_hidden_share, 0)
        require_at_most("cluster.devices.*.tp_hidden_share", self.tp_hidden_share, 1)
        for key in (
            "gemm_half_size",
            "layer_overhead_us",
            "expert_overhead_us",
            "reserved_GiB",
            "host_bandwidth_GBps",
            "host_latency_us",
        ):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0)
        require_at_least("cluster.devices.*.overlap_exponent", self.overlap_exponent, 1)
        for precision, peak in self.peak_TFLOPs.items():
            require_member("cluster.devices.*.peak_TFLOPs key", precision, PRECISIONS)
            require_at_least(f"cluster.devices.*.peak_TFLOPs.{precision}", peak, 0, strict=True)
            require_within(f"cluster.devices.*.peak_TFLOPs.{precision}", peak, *PEAKS)
        for key in ("gemm_efficiency", "attention_efficiency", "memory_efficiency"):
            require_at_most(f"cluster.devices.*.{key}", getattr(self, key), 1)
        for key, (least, most) in PLAUSIBLE.items():
            require_within(f"cluster.devices.*.{key}", getattr(self, key), least, most)


@dataclass
class ClusterConfig:
    """Node groups in rank order, the network between nodes, and the devices they name."""

    name: str = MISSING
    nodes: list[NodeGroupConfig] = MISSING
    inter_node: LinkConfig = MISSING
    devices: dict[str, DeviceConfig] = MISSING
    nvlink_domain_gpus: int | None = None
    """GPUs of neighbouring nodes that one NVLink switch joins at the intra-node rate (GB200 NVL72: 72);
    null: those of one node. Node groups may have their own."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError(
                "cluster.nodes=[] must list at least one node group; try "
                "[{count: 1, gpus: 1, device: ..., intra_node: ...}]."
            )
        if not self.devices:
            name = self.nodes[0].device
            raise ConfigError(
                f"cluster.devices={{}} must define the devices of cluster.nodes; try {{{name}: ...}}."
            )
        self.inter_node.check("cluster.inter_node")
        for index, group in enumerate(self.nodes):
            group.check(f"cluster.nodes[{index}]", tuple(self.devices))
            if self.nvlink_domain_gpus is not None and group.nvlink_domain_gpus is None:
                require_domain("cluster.nvlink_domain_gpus", self.nvlink_domain_gpus, group)

    def require_host_links(self) -> None:
        """Refuse devices whose way to host memory is not known, where a plan may offload."""
        for name in sorted({group.device for group in self.nodes}):
            if not self.devices[name].host_bandwidth_GBps:
                raise ConfigError(
                    f"cluster.devices.{name}.host_bandwidth_GBps=0 must be above 0 where space.offload is "
                    "given; try 25, which a PCIe 4.0 x16 link reaches."
                )
