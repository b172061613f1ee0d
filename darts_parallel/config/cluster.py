"""Schema of the cluster's YAML: node groups, links and devices. Units stand in the keys."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from darts_parallel.config.checks import (
    check_fields,
    ranged,
    require,
    require_member,
    require_members,
)
from darts_parallel.config.rules import check_rules
from darts_parallel.errors import Amounts

PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4")
NARROW = ("fp8", "mxfp8", "nvfp4")
"""Precisions whose weight products run below 16 bits; all else stays in 16 bits."""


@dataclass
class LinkConfig:
    """A link by the alpha-beta model."""

    bandwidth_GBps: float = ranged(MISSING, 1e-5, 1e6)
    """10^9 bytes a second, one direction: per GPU inside a node, per node between nodes."""
    latency_us: float = ranged(MISSING, 0.0, 1e8)
    """Microseconds of an empty message."""
    efficiency: float = ranged(1.0, 1e-3, 1.0)
    """Share of the bandwidth that a large message reaches."""
    shared: bool = False
    """The GPUs of a node share this one link (PCIe host bridge) instead of a port each
    (NVSwitch)."""
    peer_links: int = ranged(0, 0, 1024)
    """Number of links of a GPU without a switch, each to one other GPU of its node (MI300X: 7). A
    message to one GPU has its share of the bandwidth; 0: a switch gives it all of the bandwidth."""


def check_link(key: str, link: LinkConfig) -> None:
    """Refuse a value that is no link, and a link both shared and with a port for each GPU."""
    known = isinstance(link, LinkConfig)
    require(known, f"{key}={link}", "be a mapping", "{bandwidth_GBps: 10.0, latency_us: 5.0}")
    rule = "be 0 where shared=true, since all GPUs of a node then have one link"
    require(not (link.shared and link.peer_links), f"{key}.peer_links={link.peer_links}", rule, 0)


@dataclass
class NodeGroupConfig:
    """Equal nodes, consecutive in rank order."""

    count: int = ranged(MISSING, 1, 2**17)
    """Nodes of the group; the short word `nodes` sets it where there is one group."""
    gpus: int = ranged(MISSING, 1, 2**10)
    """GPUs of one node; the short word `gpus` sets it where there is one group."""
    device: str = MISSING
    """Name of the GPU, an entry of `cluster.devices`."""
    intra_node: LinkConfig = MISSING
    """The link between the GPUs of a node."""
    price_per_hour_usd: float | None = ranged(None, 0.0, 1e6)
    """Dollars an hour of one node; null: unknown, and no objective may ask for dollars."""
    inter_node: LinkConfig | None = None
    """The link out of each of these nodes; null: the cluster's `inter_node`."""
    nvlink_domain_gpus: int | None = ranged(None)
    """GPUs of neighbouring nodes that the intra-node link joins; null: the cluster's, else one
    node's."""

    def check(self, key: str, devices: tuple[str, ...]) -> None:
        """Refuse what breaks a rule, at the place `key` in a cluster that defines these devices."""
        require_member(f"{key}.device", self.device, devices)
        check_link(f"{key}.intra_node", self.intra_node)
        if self.inter_node is not None:
            check_link(f"{key}.inter_node", self.inter_node)
        if self.nvlink_domain_gpus is not None:
            require_domain(f"{key}.nvlink_domain_gpus", self.nvlink_domain_gpus, self)


def require_domain(key: str, domain: int, group: NodeGroupConfig) -> None:
    """Refuse an NVLink domain that cuts a node, or whose GPUs share a link."""
    gpus = group.gpus
    near = max(round(domain / gpus), 1) * gpus
    rule = f"be a multiple of the {gpus} GPUs of a node"
    require(domain % gpus == 0, f"{key}={domain}", rule, near)
    rule = "be one node where intra_node.shared=true, since a domain of several nodes gives every GPU a port"
    several = domain > gpus and group.intra_node.shared
    require(not several, f"{key}={domain}", f"{rule} of its own", gpus)


@dataclass
class DeviceConfig:
    """A GPU: its data sheet, and the shares of it that real kernels reach.

    The defaults are those of shipped GPUs without measured runs (`experiments.calibrate` writes them),
    and the average `gemm_efficiency` of GPUs with runs.
    """

    memory_GiB: float = ranged(MISSING, 1e-4, 1e5)
    """Memory of one GPU, in 2^30 bytes."""
    peak_TFLOPs: Amounts = ranged(MISSING, 1e-6, 1e6)
    """Dense peak of the data sheet by precision, in 10^12 FLOP/s: `{bf16: 989.0, fp8: 1979.0}`."""
    memory_bandwidth_GBps: float = ranged(MISSING, 1e-3, 1e6)
    """Bandwidth of the GPU's memory by the data sheet, in 10^9 bytes/s."""
    gemm_efficiency: float = ranged(0.62, 1e-3, 1.0)
    """Share of the peak that a large matrix product reaches."""
    gemm_half_size: float = ranged(42.6, 0.0, 1e5)
    """Rows or columns at which a matrix product reaches half of that (its small-shape penalty)."""
    divided_half_size: float = ranged(416.0, 0.0, 1e5)
    """Side of a rank's share of a weight, the one that tensor parallelism divides, at which half is
    lost again: few columns, or a short sum."""
    misaligned_efficiency: float = ranged(0.811, 1e-3, 1.0)
    """Share of that speed where a side of the product is no multiple of 64 elements (128 bytes)."""
    fp8_efficiency: float = ranged(0.884, 1e-3, 1.0)
    """Share of `gemm_efficiency` that fp8 products reach of the fp8 peak."""
    mxfp8_efficiency: float = ranged(0.886, 1e-3, 1.0)
    """Share of `gemm_efficiency` that mxfp8 products reach of their peak; blocks are scaled in the
    cast."""
    nvfp4_efficiency: float = ranged(0.598, 1e-3, 1.0)
    """Share of `gemm_efficiency` that nvfp4 products reach of their peak."""
    attention_efficiency: float = ranged(0.575, 1e-3, 1.0)
    """Share of the peak that fused attention (FlashAttention) with large heads reaches."""
    attention_TFLOPs: Amounts = ranged({}, 1e-6, 1e6)
    """Published speeds of attention kernels (`training.attention_kernel`), whose ratios count."""
    memory_efficiency: float = ranged(0.922, 1e-3, 1.0)
    """Share of the memory bandwidth that streaming kernels reach."""
    streaming_factor: float = ranged(1.18, 1e-2, 1e2)
    """Memory traffic of element-wise kernels against that of fused ones; eager PyTorch is above
    1."""
    layer_overhead_us: float = ranged(887.0, 0.0, 1e7)
    """Launch and framework overhead of one layer's forward pass (twice that in backward)."""
    kernel_gap_us: float = ranged(36.1, 0.0, 1e7)
    """Time of one layer's forward pass in which its kernels start and drain (twice that in
    backward)."""
    collective_start_us: float = ranged(30.8, 0.0, 1e7)
    """Start of one tensor-parallel all-reduce, whatever its bytes and ranks; hops come on top."""
    tp_hidden_share: float = ranged(0.307, 0.0, 1.0)
    """Share of the tensor-parallel communication that runs next to the products (asynchronous
    tp)."""
    overlap_exponent: float = ranged(1.41, 1.0, 64.0)
    """g of T = (a^g + b^g)^(1/g) for communication next to compute (Pollux); 1: no overlap."""
    reserved_GiB: float | None = ranged(None, 0.0, 1e5)
    """CUDA context, communication buffers, and what the allocator keeps beyond tensors; a framework
    multiplies what is above 1 GiB. Null: 1 GiB and 2.69 % of the memory."""
    state_factor: float = ranged(0.977, 1e-2, 1e2)
    """Bytes of parameters, gradients and optimizer state that the software holds, per byte of the
    formula: copies of the optimizer step, flat buffers, fragmentation."""
    activation_factor: float = ranged(0.985, 1e-2, 1e2)
    """Bytes of kept activations per byte of the formula: unfused kernels keep more, the allocator
    wastes."""
    grouped_gemm_efficiency: float = ranged(0.624, 1e-3, 1.0)
    """Share of the speed of single products that the grouped products of experts reach."""
    all_to_all_efficiency: float = ranged(0.678, 1e-3, 1.0)
    """Share of the links' bandwidth that the experts' all-to-all reaches."""
    host_bandwidth_GBps: float = ranged(0.0, 0.0, 1e6)
    """Bandwidth that copies between one GPU and host memory reach in each direction, both at once;
    0: not known, and nothing can be offloaded (`space.offload`)."""
    host_latency_us: float = ranged(10.0, 0.0, 1e7)
    """Latency of one such copy."""
    flex_gain: float = ranged(1.22, 1e-2, 1e2)
    """Bandwidth of DeepEP and HybridEP (`training.moe_token_dispatcher_type=flex`) per that of a
    plain all-to-all."""
    permutation_factor: float = ranged(0.923, 1e-2, 1e2)
    """Memory traffic of router and permutation against that of fused kernels."""
    expert_overhead_us: float = ranged(2000.0, 0.0, 1e7)
    """Launch and synchronisation overhead of one layer's experts in the forward pass (twice in
    backward)."""

    @property
    def kept_gib(self) -> float:
        """Memory that no plan can use, in 2^30 bytes: by default that of shipped GPUs without runs."""
        if self.reserved_GiB is None:
            return 1.0 + 0.0269 * self.memory_GiB
        return self.reserved_GiB


@dataclass
class RunConfig:
    """A run on this cluster: its seconds or its memory beside the calibrated figures."""

    log: str = MISSING
    """Name of the log that was read."""
    error: float = ranged(MISSING, -20.0, 20.0)
    """log(measured / predicted) by the calibrated figures."""
    sd: float = ranged(MISSING, 1e-3, 10.0)
    """Standard deviation of the part of the error that no figure explains."""
    slopes: Amounts = ranged(MISSING, -1e3, 1e3)
    """d error / d latent parameter, by `quantity|device|framework|intra link|inter link`."""


@dataclass
class ClusterConfig:
    """Node groups in rank order, the network between nodes, and the devices they name."""

    name: str = MISSING
    """Name of the cluster in reports and files."""
    nodes: list[NodeGroupConfig] = MISSING
    """Groups of equal nodes, in the order of the ranks."""
    inter_node: LinkConfig = MISSING
    """The link between nodes: bandwidth of one node, one direction."""
    devices: dict[str, DeviceConfig] = MISSING
    """GPUs by name; `/device@devices.NAME: FILE` in the defaults reads a shipped one."""
    nvlink_domain_gpus: int | None = ranged(None)
    """GPUs of neighbouring nodes that one NVLink switch joins at the intra-node rate (GB200 NVL72:
    72). null: a switch joins the GPUs of one node. Node groups may have their own."""
    mtbf_hours_per_gpu: float | None = ranged(None, 1e-3, 1e9)
    """Mean hours between failures of one GPU, those of software among them; null: failures are not
    considered."""
    checkpoint_GBps: float | None = ranged(None, 1e-6, 1e9)
    """10^9 bytes a second that all GPUs together write while training stands still. null: failures are not
    considered."""
    checkpoint_GB: float | None = ranged(None, 1e-9, 1e9)
    """Size of a checkpoint; null: weights and optimizer state of what is trained."""
    restart_minutes: float = ranged(10.0, 0.0, 1e5)
    """Time from a failure to the next iteration: find it, replace the node, read the checkpoint."""
    repair_hours: float = ranged(24.0, 1e-3, 1e5)
    """Mean time until a failed node is a spare again."""
    spare_nodes: int = ranged(0, 0, 2**17)
    """Idle nodes next to `nodes`; each can replace any."""
    runs: list[RunConfig] = field(default_factory=list)
    """Runs that have moved its figures (`tune --from-log`), which then hold as they stand for
    `runs_of`."""
    runs_of: str | None = None
    """Framework (`training.software`) of these runs; null: there are none."""

    def __post_init__(self) -> None:
        near = "[{count: 1, gpus: 1, device: ..., intra_node: ...}]"
        listed = bool(self.nodes) and not isinstance(
            self.nodes, str
        )  # which an interpolation may hide
        require(listed, f"cluster.nodes={self.nodes}", "list at least one node group", near)
        near = f"{{{self.nodes[0].device}: ...}}"
        require(
            bool(self.devices), "cluster.devices={}", "define the devices of cluster.nodes", near
        )
        check_fields("cluster", self)
        for name, device in self.devices.items():
            require_members(
                f"cluster.devices.{name}.peak_TFLOPs key", device.peak_TFLOPs, PRECISIONS
            )
        check_link("cluster.inter_node", self.inter_node)
        for index, group in enumerate(self.nodes):
            group.check(f"cluster.nodes[{index}]", tuple(self.devices))
            if self.nvlink_domain_gpus is not None and group.nvlink_domain_gpus is None:
                require_domain("cluster.nvlink_domain_gpus", self.nvlink_domain_gpus, group)
        check_rules("cluster", self)

    @property
    def used_devices(self) -> list[str]:
        """Names of the devices that some nodes have."""
        return sorted({group.device for group in self.nodes})

    def require_host_links(self) -> None:
        """Refuse devices whose way to host memory is not known, where a plan may offload."""
        for name in self.used_devices:
            key = f"cluster.devices.{name}"
            rule = "be above 0 where space.offload is given"
            near = "25, which a PCIe 4.0 x16 link reaches"
            known = self.devices[name].host_bandwidth_GBps > 0
            require(known, f"{key}.host_bandwidth_GBps=0", rule, near)
