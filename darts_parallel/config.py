"""Schema of the YAML configuration: plain dataclasses that Hydra fills and `__post_init__` checks.

Units stand in the keys; conversion to SI happens in `cluster.py` and nowhere else.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from darts_parallel.errors import ConfigError

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
OPTIMIZERS = ("adam", "sgd")
RECOMPUTE = ("none", "selective", "full")
SPACES = ("uniform", "stagewise", "layerwise")
COSTS = ("analytic", "searcher")
RELAXATIONS = ("softmax", "gumbel")


def require_at_least(key: str, value: float, minimum: float, *, strict: bool = False) -> None:
    """Refuse `value` of `key` below `minimum` (or equal to it, when `strict`)."""
    if value < minimum or (strict and value == minimum) or value != value:
        rule = "above" if strict else "at least"
        near = f"a value above {minimum:g}" if strict else f"{minimum:g}"
        raise ConfigError(f"{key}={value:g} must be {rule} {minimum:g}; nearest legal: {near}.")


def require_member(key: str, value: Any, members: tuple[Any, ...]) -> None:
    """Refuse `value` of `key` that is none of `members`, naming the nearest one."""
    if value in members:
        return
    if isinstance(value, (int, float)):
        near = min(members, key=lambda member: abs(member - value))
    else:
        close = get_close_matches(str(value), [str(member) for member in members], n=1, cutoff=0.0)
        near = close[0] if close else members[0]
    names = ", ".join(str(member) for member in members)
    raise ConfigError(f"{key}={value} must be one of {names}; nearest legal: {near}.")


def nearest_divisor(number: int, value: int) -> int:
    """The divisor of `number` that is closest to `value`."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - value), d))


@dataclass
class ModelConfig:
    """A Transformer: `num_layers` blocks between an embedding and a head."""

    name: str = MISSING
    num_layers: int = MISSING
    """Transformer blocks; with `num_encoder_layers` the first of them form the encoder."""
    hidden_size: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int | None = None
    """Key/value heads of grouped-query attention; null: as `num_heads`."""
    head_dim: int | None = None
    """Size of one head; null: hidden_size / num_heads."""
    ffn_hidden_size: int | None = None
    """Inner size of the MLP; null: 4 * hidden_size."""
    gated_mlp: bool = False
    """Two input projections (SwiGLU, GeGLU) instead of one."""
    vocab_size: int = MISSING
    tie_embeddings: bool = True
    max_seq_len: int = MISSING
    num_encoder_layers: int = 0
    """Blocks of an encoder whose output every later (decoder) block attends to; 0: none."""
    causal: bool = True
    """False: every token attends to all (BERT)."""
    learned_positions: bool = True
    """A table of `max_seq_len` position embeddings (GPT-2, BERT); false: rotary, ALiBi, relative."""
    dropout: bool = True
    """Dropout masks are kept for backward (1 byte an element); Llama trains without."""
    linear_bias: bool = True
    norm_bias: bool = True
    """LayerNorm has scale and shift; RMSNorm only a scale."""
    embedding_norm: bool = False
    """A normalisation right after the embedding (BLOOM, BERT)."""
    head_transform: bool = False
    """A dense layer and a norm before the output projection (BERT's masked-language head)."""

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len"):
            require_at_least(f"model.{key}", getattr(self, key), 1)
        for key in ("num_kv_heads", "head_dim", "ffn_hidden_size"):
            if getattr(self, key) is not None:
                require_at_least(f"model.{key}", getattr(self, key), 1)
        require_at_least("model.num_encoder_layers", self.num_encoder_layers, 0)
        if self.num_encoder_layers >= self.num_layers:
            raise ConfigError(
                f"model.num_encoder_layers={self.num_encoder_layers} must leave a decoder layer of "
                f"model.num_layers={self.num_layers}; nearest legal: {self.num_layers - 1}."
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            near = nearest_divisor(self.hidden_size, self.num_heads)
            raise ConfigError(
                f"model.num_heads={self.num_heads} must divide "
                f"model.hidden_size={self.hidden_size}; nearest legal: {near}."
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            near = nearest_divisor(self.num_heads, self.num_kv_heads)
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} must divide "
                f"model.num_heads={self.num_heads}; nearest legal: {near}."
            )


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

    def __post_init__(self) -> None:
        require_at_least("cluster link bandwidth_GBps", self.bandwidth_GBps, 0, strict=True)
        require_at_least("cluster link latency_us", self.latency_us, 0)
        require_at_least("cluster link efficiency", self.efficiency, 0, strict=True)
        if self.efficiency > 1:
            raise ConfigError(
                f"cluster link efficiency={self.efficiency:g} must be at most 1; nearest legal: 1."
            )


@dataclass
class NodeGroupConfig:
    """Equal nodes, consecutive in rank order."""

    count: int = MISSING
    gpus: int = MISSING
    device: str = MISSING
    intra_node: LinkConfig = MISSING
    price_per_hour_usd: float | None = None

    def __post_init__(self) -> None:
        require_at_least("cluster.nodes[].count", self.count, 1)
        require_at_least("cluster.nodes[].gpus", self.gpus, 1)
        if self.price_per_hour_usd is not None:
            require_at_least("cluster.nodes[].price_per_hour_usd", self.price_per_hour_usd, 0)


@dataclass
class DeviceConfig:
    """A GPU: its data sheet, and the shares of it that real kernels reach."""

    memory_GiB: float = MISSING
    peak_TFLOPs: dict[str, float] = MISSING
    memory_bandwidth_GBps: float = MISSING
    gemm_efficiency: float = 0.75
    """Share of the peak that a large matrix product reaches."""
    gemm_half_size: float = 128.0
    """Rows or columns at which a matrix product reaches half of that (its small-shape penalty)."""
    attention_efficiency: float = 0.45
    """Share of the peak that the attention core reaches when fused (FlashAttention)."""
    memory_efficiency: float = 0.8
    """Share of the memory bandwidth that streaming kernels reach."""
    layer_overhead_us: float = 20.0
    """Launch and framework overhead of one layer's forward pass (twice that in backward)."""
    overlap_exponent: float = 2.0
    """g of T = (a^g + b^g)^(1/g) for communication beside compute (Pollux); 1: no overlap."""
    reserved_GiB: float = 1.5
    """CUDA context, communication buffers, allocator fragmentation."""

    def __post_init__(self) -> None:
        require_at_least("cluster.devices.*.memory_GiB", self.memory_GiB, 0, strict=True)
        for key in ("memory_bandwidth_GBps", "gemm_efficiency", "attention_efficiency"):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0, strict=True)
        require_at_least("cluster.devices.*.memory_efficiency", self.memory_efficiency, 0, strict=True)
        for key in ("gemm_half_size", "layer_overhead_us", "reserved_GiB"):
            require_at_least(f"cluster.devices.*.{key}", getattr(self, key), 0)
        require_at_least("cluster.devices.*.overlap_exponent", self.overlap_exponent, 1)
        for precision, peak in self.peak_TFLOPs.items():
            require_member("cluster.devices.*.peak_TFLOPs key", precision, PRECISIONS)
            require_at_least(f"cluster.devices.*.peak_TFLOPs.{precision}", peak, 0, strict=True)
        for key in ("gemm_efficiency", "attention_efficiency", "memory_efficiency"):
            if getattr(self, key) > 1:
                raise ConfigError(
                    f"cluster.devices.*.{key}={getattr(self, key):g} must be at most 1; "
                    "nearest legal: 1."
                )


@dataclass
class ClusterConfig:
    """Node groups in rank order, the network between nodes, and the devices they name."""

    name: str = MISSING
    nodes: list[NodeGroupConfig] = MISSING
    inter_node: LinkConfig = MISSING
    devices: dict[str, DeviceConfig] = MISSING

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("cluster.nodes=[] must list at least one node group.")
        for group in self.nodes:
            require_member("cluster.nodes[].device", group.device, tuple(self.devices))


@dataclass
class TrainingConfig:
    """One training job."""

    global_batch_size: int = MISSING
    """Sequences in one optimizer step."""
    seq_len: int = MISSING
    precision: str = "bf16"
    optimizer: str = "adam"
    fused_attention: bool = True
    """FlashAttention-like kernels: the score matrix never reaches memory."""

    def __post_init__(self) -> None:
        require_at_least("training.global_batch_size", self.global_batch_size, 1)
        require_at_least("training.seq_len", self.seq_len, 1)
        require_member("training.precision", self.precision, PRECISIONS)
        require_member("training.optimizer", self.optimizer, OPTIMIZERS)


@dataclass
class SpaceConfig:
    """What the search may choose from; null leaves a choice free, a value or list pins it."""

    kind: str = "layerwise"
    pp: Any = None
    num_micro_batches: Any = None
    micro_batch_size: Any = None
    dp: Any = None
    tp: Any = None
    zero_stage: Any = None
    recompute: Any = None
    sequence_parallel: Any = None

    def __post_init__(self) -> None:
        require_member("space.kind", self.kind, SPACES)
        for key in ("pp", "num_micro_batches", "micro_batch_size", "dp", "tp"):
            for value in self.pinned(key) or ():
                self._require_integer(key, value)
                require_at_least(f"space.{key}", value, 1)
        for value in self.pinned("zero_stage") or ():
            self._require_integer("zero_stage", value)
            require_member("space.zero_stage", value, (0, 1, 2, 3))
        for value in self.pinned("recompute") or ():
            require_member("space.recompute", value, RECOMPUTE)
        for value in self.pinned("sequence_parallel") or ():
            if not isinstance(value, bool):
                raise ConfigError(
                    f"space.sequence_parallel={value} must be true or false; nearest legal: true."
                )

    def pinned(self, key: str) -> tuple[Any, ...] | None:
        """The values that the user allows for `key`, or None where all are."""
        value = getattr(self, key)
        if value is None:
            return None
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not values:
            raise ConfigError(f"space.{key}=[] must list at least one value, or be null for all.")
        return values

    @staticmethod
    def _require_integer(key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"space.{key}={value} must be a whole number or a list of them.")


@dataclass
class SearchConfig:
    """The gradient search (design section 3 gives the source of each default)."""

    num_steps: int = 300
    num_restarts: int = 32
    seed: int = 0
    relaxation: str = "softmax"
    """`softmax`, or `gumbel` for straight-through Gumbel-softmax samples."""
    learning_rate: float = 0.1
    boundary_learning_rate: float = 0.05
    adam_betas: list[float] = field(default_factory=lambda: [0.5, 0.999])
    temperature: list[float] = field(default_factory=lambda: [2.0, 0.05])
    """First and last softmax temperature, geometric in between."""
    boundary_temperature: list[float] = field(default_factory=lambda: [1.0, 0.1])
    """The same for the stage edges, in layers."""
    sharpness: list[float] = field(default_factory=lambda: [20.0, 220.0])
    """The same for the smooth maximum over stages."""
    initial_noise: float = 0.3
    """Standard deviation of the per-layer noise on the shared initial preference."""
    initial_preference: float = 3.0
    """Logit of the strategy that all layers of a restart prefer at first."""
    multiplier_step: float = 1.0
    """Step of the augmented Lagrangian's memory multipliers."""
    penalty: float = 10.0
    """Quadratic penalty on the relative memory violation."""
    thin_at: list[float] = field(default_factory=lambda: [0.25, 0.5])
    """Shares of the steps after which the worse half of the restarts is dropped."""
    hard_stages_from: float = 0.5
    """Share of the steps after which stage edges are rounded in the forward pass (straight-through)."""
    hard_choices_from: float = 1.0
    """The same for strategies; 1 keeps them soft to the end."""
    hard_every: int = 10
    """Steps between discretizations of all restarts."""
    polish: bool = True
    polish_starts: int = 8
    """Best distinct discretized plans that are polished."""
    max_seconds: float = 60.0
    """The search stops cleanly after this long and returns its best plan."""

    def __post_init__(self) -> None:
        for key in ("num_steps", "num_restarts", "hard_every", "polish_starts"):
            require_at_least(f"search.{key}", getattr(self, key), 1)
        require_at_least("search.seed", self.seed, 0)
        require_member("search.relaxation", self.relaxation, RELAXATIONS)
        for key in ("learning_rate", "boundary_learning_rate", "max_seconds"):
            require_at_least(f"search.{key}", getattr(self, key), 0, strict=True)
        for key in ("initial_noise", "initial_preference", "multiplier_step", "penalty"):
            require_at_least(f"search.{key}", getattr(self, key), 0)
        for key in ("temperature", "boundary_temperature", "sharpness", "adam_betas"):
            values = getattr(self, key)
            if len(values) != 2:
                raise ConfigError(f"search.{key}={list(values)} must be a list of two numbers.")
            for value in values:
                require_at_least(f"search.{key}", value, 0, strict=True)
        if max(self.adam_betas) >= 1:
            raise ConfigError(
                f"search.adam_betas={list(self.adam_betas)} must lie in (0, 1); nearest legal: 0.999."
            )


@dataclass
class CostConfig:
    """Which cost model scores the plans."""

    name: str = "analytic"

    def __post_init__(self) -> None:
        require_member("cost.name", self.name, COSTS)


@dataclass
class VerificationConfig:
    """The exact baselines that check the plan."""

    enabled: bool = True
    max_seconds: float = 60.0
    """An oracle that needs longer stops, and the report says so with the bound it reached."""

    def __post_init__(self) -> None:
        require_at_least("verification.max_seconds", self.max_seconds, 0)


@dataclass
class OutputConfig:
    """What the command leaves in the run directory besides `plan.json`."""

    tensorboard: bool = True
    progress: bool = True


@dataclass
class Config:
    """The whole configuration of one run."""

    model: ModelConfig = MISSING
    cluster: ClusterConfig = MISSING
    training: TrainingConfig = MISSING
    space: SpaceConfig = MISSING
    search: SearchConfig = MISSING
    cost: CostConfig = MISSING
    verification: VerificationConfig = field(default_factory=VerificationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    plan: str | None = None
    """A plan.json to evaluate on this problem instead of searching."""

    def __post_init__(self) -> None:
        if self.model is not MISSING and self.training is not MISSING:
            self._check_together()

    def _check_together(self) -> None:
        if self.training.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"training.seq_len={self.training.seq_len} must be at most "
                f"model.max_seq_len={self.model.max_seq_len}; nearest legal: {self.model.max_seq_len}."
            )
        for name in {group.device for group in self.cluster.nodes}:
            peaks = self.cluster.devices[name].peak_TFLOPs
            if self.training.precision not in peaks:
                names = ", ".join(peaks)
                raise ConfigError(
                    f"training.precision={self.training.precision} is not given in "
                    f"cluster.devices.{name}.peak_TFLOPs; it lists {names}."
                )


def register_schema() -> None:
    """Give Hydra the schema that `conf/config.yaml` and its groups are checked against."""
    ConfigStore.instance().store(name="schema", node=Config)


def config_dir() -> str:
    """Folder of the shipped configuration, in a wheel or in a checkout.

    Errors:
        ConfigError: neither place holds `config.yaml`.
    """
    package = Path(__file__).resolve().parent
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if (place / "config.yaml").is_file():
            return str(place)
    raise ConfigError(f"config.yaml was found neither in {places[0]} nor in {places[1]}.")
