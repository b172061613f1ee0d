"""A training framework: its messages, its efficiencies and its memory.

A file of `conf/software` states the habits (documented by the framework itself) and the figures
that `python -m experiments.calibrate` fitted to runs of it. Efficiencies of products and attention
belong to a device and a framework together: the file holds what the framework adds to the logit of
the device's share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from typing import Any

from darts_parallel.config import (
    DeviceConfig,
    TrainingConfig,
    group_file,
    group_names,
    module_data,
    read_yaml,
    require,
)
from darts_parallel.errors import Amounts, ConfigError, Entries, require_listed

ANY = "any"
"""Key of an offset for devices on which the framework has no runs."""
OFFSETS = "offsets"
NO_HABITS = ("name", "partitioned_checkpoints", "job", "values", OFFSETS)
"""Fields of `Software` that its file does not give, or gives in another form."""
CONTEXT_GIB = 1.0
"""GiB of a GPU outside of the allocator: CUDA context, communicators, workspaces."""
USUAL_KERNEL = "fa2"
"""Attention kernel of `attention_efficiency` on a device with several."""
OLD_KERNEL = "fa1"
"""Attention kernel of measured runs that no job can ask for."""
SWITCHED: Mapping[str, Mapping[Any, Mapping[str, float]]] = module_data(__file__)
"""Factors of a device's figures by switch and value, from `software.yaml` next to this file."""
FULL = {"attention_efficiency": 1.0, "tp_hidden_share": 1.0}
"""Largest values of shares."""
LOSS_CHUNKS = 8
"""Parts of a chunked loss (torchtitan's ChunkedLossWrapper)."""


@dataclass(frozen=True)
class Software:
    """A training framework; the defaults are common to all."""

    name: str = ""
    gradient_bits: int | None = None
    """Bits of a gradient, accumulated and sent; None: 32 with bf16 and below, 16 with fp16."""
    owner_broadcast_ms: float = 0.0
    """Milliseconds of the broadcast by which each owner of a ZeRO-1 shard returns its parameters; 0:
    gathered."""
    single_ring: bool = False
    """ZeRO-3 gathers and scatters each tensor over one ring, which leaves a node by one of its
    adapters."""
    module_gather_ms: float = 0.0
    """Milliseconds of ZeRO-3 to gather an expert's matrix, where each is a module of its own; 0: gathered
    with the layer."""
    buffered_parameters: float = 0.0
    """Most parameters, 16 bits each, that ZeRO-3 holds whole in buffers of fixed size: gathered ones
    and buckets of gradients."""
    gradient_copy: bool = False
    """The 16-bit gradient stays in memory beside the float32 one that accumulates it."""
    fused_accumulation: bool = False
    """The products that compute gradients of weights add them to the sum of the micro-batches."""
    step_bytes: float = 0.0
    """Bytes a parameter, sharded as the optimizer's state, that its step takes and the allocator
    keeps."""
    sub_group_parameters: float = 0.0
    """Most parameters of a rank that a step of ZeRO-3 updates at once."""
    host_update_s: float = 0.0
    """Seconds in which a node's processors update a parameter whose state is offloaded; 0: its GPUs
    do."""
    reserved_factor: float = 1.0
    """Bytes of a device beyond tensors and context, per those that frameworks usually keep."""
    loss_bytes: float = 6.0
    """Bytes a logit of a micro-batch: 16 bits and the softmax in float32, as in Megatron's
    cross-entropy."""
    fused_loss_bytes: float = 0.0
    """Bytes a logit with `training.loss=fused`; 0 where head and loss are one kernel."""
    gathered_inputs: bool = False
    """Products keep the whole inputs that sequence parallelism gathers for them, not a rank's
    part."""
    gate_kept: bool = False
    """A gated MLP keeps the gate's activation, which fused kernels compute again."""
    eager_blocks: bool = False
    """Every operator of a block is a kernel: an RMSNorm keeps its input in float32 and the normalized one in
    16 bits, and backward holds the gradients of all inner features of an MLP at once."""
    narrow_copies_freed: bool = False
    """Copies of weights below 16 bits are freed with the weights that ZeRO-3 gathered, as under
    PyTorch's FSDP2."""
    prunes_recomputation: bool = False
    """Recomputation leaves out the last product of an MLP, whose result backward does not read."""
    alternate_products: bool = False
    """Selective recomputation repeats every second product of a dense block and what lies between
    (torchtitan's `SelectiveAC`), priced as full recomputation of half of the block."""
    partitioned_checkpoints: bool = False
    """Full recomputation keeps a rank's part of a block's input (DeepSpeed's
    `partition_activations`)."""
    runs: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the runs to which its figures are fitted, by key of `training`."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the job that are known, which move its figures."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Fields of `DeviceConfig` that the framework decides, by name."""
    offsets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Added to the logit of a device's share: by field of `DeviceConfig`, then by device (`ANY`:
    others)."""

    def on(self, device: str, config: DeviceConfig) -> DeviceConfig:
        """Return the device's figures under this framework."""
        changed: Entries = dict(self.values)
        if self.reserved_factor != 1.0:
            kept = max(config.kept_gib - CONTEXT_GIB, 0.0)
            changed["reserved_GiB"] = config.kept_gib + (self.reserved_factor - 1.0) * kept
        for name, own in self.offsets.items():
            share = getattr(config, name)
            logit = log(share / (1.0 - share)) + own.get(device, own.get(ANY, 0.0))
            changed[name] = 1.0 / (1.0 + exp(-logit))
        for name, factor in self.switch_factors(config.attention_TFLOPs).items():
            moved = changed.get(name, getattr(config, name)) * factor
            changed[name] = min(moved, FULL.get(name, moved))
        return replace(config, **changed) if changed else config

    def summed_bits(self, precision: str) -> int:
        """Return the bits of a gradient, accumulated and sent, in a precision of products."""
        return self.gradient_bits or (16 if precision == "fp16" else 32)

    def under(self, training: TrainingConfig) -> "Software":
        """Return the framework under the switches of a job; what is null stays an average.

        Errors:
            ConfigError: its figures are of compiled runs, and the job is not compiled.
        """
        if self.runs.get("compiled") and training.compiled is False:
            rule = "go with training.compiled=true, as its runs did"
            near = "training.compiled=true, or another training.software"
            require(False, f"training.software={self.name}", rule, near)
        bytes_of = {"chunked": self.loss_bytes / LOSS_CHUNKS, "fused": self.fused_loss_bytes}
        loss = bytes_of.get(training.loss or "", self.loss_bytes)
        bits = training.gradient_bits or self.gradient_bits
        job = {key: own for key in SWITCHED if (own := getattr(training, key)) is not None}
        own = replace(self, gradient_bits=bits, loss_bytes=loss, job=job)
        # the files load Liger Kernel for it, whose norms and MLP are kernels as well
        fused = self.eager_blocks and training.loss == "fused"
        return replace(own, eager_blocks=False, gate_kept=False) if fused else own

    def switch_factors(self, speeds: Mapping[str, float]) -> Amounts:
        """Return the factors by which the switches of a run move the figures of a device.

        The job's switch counts, else what the framework sets by default.

        Args:
            speeds: Published speeds of attention kernels on the device.
        """
        known = {**self.runs, **self.job}
        factors: Amounts = {}
        for key, by_value in SWITCHED.items():
            factors |= by_value.get(known.get(key), {})
        if (kernel := str(known.get("attention_kernel"))) in speeds:
            factors["attention_efficiency"] = speeds[kernel] / speeds[USUAL_KERNEL]
        return factors


COMMON = Software()
HABITS = tuple(key for key in vars(COMMON) if key not in NO_HABITS)
"""Fields that files of `conf/software` give under the same names."""


def with_habits(name: str, facts: Mapping[str, Any]) -> Software:
    """Build a framework of its habits alone: those of `facts` that `HABITS` names."""
    return Software(name, **{key: facts[key] for key in HABITS if key in facts})


def read_software(name: str | None, own: Mapping[str, Any] | None = None) -> Software:
    """Read the framework of a name; the common one for None.

    Args:
        own: Content of a user's file of that name, which takes the place of a shipped one.

    Errors:
        ConfigError: there is no such file, or it has an unknown key.
    """
    if name is None:
        return COMMON
    if own:
        return _software(name, dict(own))
    names = group_names("software")
    rule = f"training.software={name} must be null or one of {', '.join(names)}"
    require_listed(name, names, rule, ConfigError)
    return _shipped(name)


@lru_cache(maxsize=32)
def _shipped(name: str) -> Software:
    return _software(name, read_yaml(group_file("software", name)) or {})


def _software(name: str, data: Entries) -> Software:
    """Build a framework of the content of its file."""
    offsets = data.pop("offsets", {})
    software = with_habits(name, data)
    data = {key: value for key, value in data.items() if key not in HABITS}
    known = DeviceConfig.__dataclass_fields__
    for key in (*data, *offsets):
        if key not in known:
            raise ConfigError(f"software/{name}.yaml: {key} is not a field of a device.")
    return replace(software, values=data, offsets=offsets)
