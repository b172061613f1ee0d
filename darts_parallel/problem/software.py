"""A training framework: its messages, its efficiencies and its memory.

A file of `conf/software` states the habits (documented by the framework itself) and the figures
that
`python -m experiments.calibrate` fitted to runs of it. Efficiencies of products and attention
belong to a
device and a framework together: the file holds what the framework adds to the logit of the device's
share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Any

import yaml

from darts_parallel.config import DeviceConfig, config_dir
from darts_parallel.errors import ConfigError, closest

ANY = "any"
"""Key of an offset for devices on which the framework has no runs."""
HABITS = (
    "gradient_bits",
    "owner_broadcast_ms",
    "single_ring",
    "gradient_copy",
    "step_bytes",
    "loss_bytes",
    "gathered_inputs",
    "gate_kept",
)
OFFSETS = "offsets"


@dataclass(frozen=True)
class Software:
    """A training framework; the defaults are common to all."""

    name: str = ""
    gradient_bits: int | None = None
    """Bits of a gradient, accumulated and sent; None: 32 with bf16 and below, 16 with fp16."""
    owner_broadcast: float = 0.0
    """Seconds of the broadcast by which each owner of a ZeRO-1 shard returns its parameters; 0:
    gathered."""
    single_ring: bool = False
    """ZeRO-3 gathers and scatters each tensor over one ring, which leaves a node by one of its
    adapters."""
    gradient_copy: bool = False
    """The 16-bit gradient stays in memory beside the float32 one that accumulates it."""
    step_bytes: float = 0.0
    """Bytes a parameter, sharded as the optimizer's state, that its step takes and the allocator
    keeps."""
    loss_bytes: float = 6.0
    """Bytes a logit of a micro-batch: 16 bits and the softmax in float32, as in Megatron's
    cross-entropy."""
    gathered_inputs: bool = False
    """Products keep the whole inputs that sequence parallelism gathers for them, not a rank's
    part."""
    gate_kept: bool = False
    """A gated MLP keeps the gate's activation, which fused kernels compute again."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Fields of `DeviceConfig` that the framework decides, by name."""
    offsets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Added to the logit of a device's share: by field of `DeviceConfig`, then by device (`ANY`:
    others)."""

    def on(self, device: str, config: DeviceConfig) -> DeviceConfig:
        """Return the device's figures under this framework."""
        changed: dict[str, Any] = dict(self.values)
        for name, own in self.offsets.items():
            share = getattr(config, name)
            logit = log(share / (1.0 - share)) + own.get(device, own.get(ANY, 0.0))
            changed[name] = 1.0 / (1.0 + exp(-logit))
        return replace(config, **changed) if changed else config


COMMON = Software()


def with_habits(name: str, facts: Mapping[str, Any]) -> Software:
    """Build a framework of its habits alone: those of `facts` that `HABITS` names."""
    habits = {key: facts[key] for key in HABITS if key in facts}
    return Software(name, owner_broadcast=habits.pop("owner_broadcast_ms", 0.0) * 1e-3, **habits)


def software_names() -> list[str]:
    """Return the names of the files of `conf/software`."""
    return sorted(file.stem for file in (Path(config_dir()) / "software").glob("*.yaml"))


@lru_cache(maxsize=32)
def read_software(name: str | None) -> Software:
    """Read the framework of a name; the common one for None.

    Errors:
        ConfigError: there is no such file, or it has an unknown key.
    """
    if name is None:
        return COMMON
    names = software_names()
    if name not in names:
        near = closest(name, names)
        raise ConfigError(
            f"training.software={name} must be null or one of {', '.join(names)}; try {near}."
        )
    text = (Path(config_dir()) / "software" / f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text) or {}  # type: ignore[no-untyped-call]
    offsets = data.pop(OFFSETS, {})
    software = with_habits(name, data)
    data = {key: value for key, value in data.items() if key not in HABITS}
    known = {entry.name for entry in fields(DeviceConfig)}
    for key in (*data, *offsets):
        if key not in known:
            raise ConfigError(f"conf/software/{name}.yaml: {key} is not a field of a device.")
    return replace(software, values=data, offsets=offsets)
