"""Measured runs, complete: the row type, and the CSV file that the project ships (`measured.csv`)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from darts_parallel.config import ModelConfig, group_file, read_yaml
from darts_parallel.planner import FAMILIES
from darts_parallel.problem import read_rows
from darts_parallel.report import csv_text
from experiments.data import DATA
from experiments.data.table import first

Sizes = dict[str, Any]
"""Fields of `ModelConfig`."""

SHIPPED = DATA / "measured.csv"
ALTERNATE = "alternate"
"""Full recomputation of every second block; also the closest to torchtitan's operator-wise selective
recomputation, which repeats every second matrix product (torchtitan, `activation_checkpoint`)."""
DEVICE = "device"
ALLOCATED = "allocated"
"""Memory metrics: total device usage, which is what runs out; the allocator's peak or a formula, in which
neither context nor communication buffers nor unused blocks are."""
NOT_PRINTED = "not printed: "
"""Begin of a note; names of cells follow, up to a semicolon."""


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run: a column of `measured.csv` a field. Fields of configurations have their names."""

    file: str
    row: int
    """Line of the file on which it begins; the header is line 1."""
    model: str
    source: str = ""
    note: str = ""
    """Cells that the source does not print, and where the seconds come from."""
    skipped: str = ""
    """Reason why it cannot be used; then all below but the next two may be defaults."""
    mixture: bool = False
    """Whether the model has experts."""
    gpu: str = ""
    """As printed."""
    printed_precision: str = ""

    gpus: int = 0
    gpus_per_node: int = 0
    """GPUs that are used on each node."""
    devices: tuple[str, ...] = ()
    """File of `conf/device` of every kind of node, in the order of the ranks."""
    nodes: tuple[int, ...] = ()
    """Nodes of every kind."""
    intra_links: tuple[str, ...] = ()
    """Link inside a node, whose fit it shares."""
    intra_GBps: tuple[float, ...] = ()  # noqa: N815
    """10^9 bytes/s one way of a GPU."""
    inter_links: tuple[str, ...] = ()
    inter_GBps: tuple[float, ...] = ()  # noqa: N815
    """10^9 bytes/s one way of a node."""

    framework: str = "default"
    gradient_bits: int | None = None
    """Bits of a gradient on the wire; None: as it is accumulated."""

    architecture: str = ""
    """Sizes of mixtures and hybrids: a file of `conf/model`, then fields that differ, as `key=value`."""
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    ffn_hidden_size: int = 0
    gated_mlp: bool = False
    vocab_size: int = 0
    tie_embeddings: bool = True
    causal: bool = True
    learned_positions: bool = True
    dropout: bool = True
    linear_bias: bool = True
    norm_bias: bool = True
    embedding_norm: bool = False

    global_batch_size: int = 0
    seq_len: int = 0
    precision: str = ""
    attention_kernel: str | None = None
    """Switches below that are None are unknown: priced at the mean of their values."""
    tp_comm_overlap: bool | None = None
    compiled: bool | None = None
    loss: str | None = None
    optimizer: str = "adam"
    switches_from: str = ""
    """Where each known switch comes from: `printed` by the row, or the `recipe` that `words.yaml` cites."""
    lora_rank: int = 0
    """Rank of the adapters that alone are trained; 0: all weights are."""
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    frozen_bits: int = 16
    cuda_graphs: str = "none"
    fp8_dot_product_attention: bool = False
    recompute_modules: tuple[str, ...] = ()
    """Modules that selective recomputation repeats; none: the default."""
    moe_token_dispatcher_type: str = "alltoall"
    overlap_moe_expert_parallel_comm: bool = False

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual_stages: int = 1
    blocks: tuple[int, ...] = ()
    """Blocks of every chunk of the pipeline, without embedding, head and loss."""
    num_micro_batches: int = 0
    zero_stage: int = 0
    shard_size: int = 0
    """Ranks that share a state; 0: all of them."""
    recompute: str = "none"
    """`none`, `selective`, `full` or `ALTERNATE`."""
    sequence_parallel: bool = False
    offload: bool = False
    """The optimizer state lies in host memory."""
    cpu_checkpointing: bool = False
    """Inputs of recomputed blocks lie in host memory (DeepSpeed's `cpu_checkpointing`)."""
    partition_activations: bool = False
    """They are divided over the tensor-parallel ranks (DeepSpeed's key of that name)."""
    host_GiB: float | None = None  # noqa: N815
    """Host memory that a GPU's process may take, where a source prints it."""

    iteration_s: float | None = None
    memory_GiB: float | None = None  # noqa: N815
    out_of_memory: bool = False
    """The run ended for want of memory, so that neither seconds nor bytes were measured."""
    memory_metric: str = DEVICE
    """Kind of memory that `memory_GiB` counts: `DEVICE` or `ALLOCATED`."""

    @property
    def name(self) -> str:
        """Name model, job and machine."""
        return (
            f"{self.model}, {self.hidden_size} x {self.num_layers}, batch {self.global_batch_size}, "
            f"{self.gpus} x {self.gpu}, {self.printed_precision or self.precision}, {self.framework}"
        )

    @property
    def house(self) -> str:
        """Publisher and stack, `houses` of `words.yaml`; the source's first words where it is not listed."""
        text = f"{self.source} {self.framework}".lower()
        found = first("houses", text)
        return str(found["name"]) if found else " ".join(text.split()[:2])

    @property
    def device_family(self) -> str:
        """First device, by the name of the one whose calibrated figures it shares."""
        return FAMILIES.get(self.devices[0], self.devices[0])

    def prints(self, cell: str) -> bool:
        """Tell whether the source prints a cell, one of `stated` of `words.yaml`."""
        return cell not in self.note.partition(NOT_PRINTED)[2].partition(";")[0].split()

    @property
    def memory_bytes(self) -> float | None:
        """Return the measured bytes; None where there are none."""
        return None if self.memory_GiB is None else self.memory_GiB * 2.0**30


DEFAULTS = {field.name: field.default for field in fields(MeasuredRun)}
TYPES = get_type_hints(MeasuredRun)


def read_runs(path: Path = SHIPPED) -> list[MeasuredRun]:
    """Read the runs of a file that `write_runs` wrote."""
    return [
        MeasuredRun(**{key: _value(key, cell) for key, cell in row.items()})
        for _, row in read_rows(path, ())
    ]


def write_runs(runs: Iterable[MeasuredRun]) -> str:
    """Write runs as CSV text; a cell of the default value is empty."""
    lines = [[_cell(key, value) for key, value in asdict(run).items()] for run in runs]
    return csv_text(tuple(TYPES), lines)


def _cell(key: str, value: Any) -> str:
    if value == DEFAULTS[key]:
        return ""
    return " + ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(key: str, cell: str) -> Any:
    if not cell:
        return DEFAULTS[key] if key not in ("file", "model") else ""
    kind = str(TYPES[key])
    convert: Any = next((c for c in (int, float, bool) if c.__name__ in kind), str)
    if "tuple" in kind:
        return tuple(convert(part) for part in cell.split(" + "))
    return cell == "True" if convert is bool else convert(cell)


@lru_cache(maxsize=32)
def preset_sizes(name: str) -> Sizes:
    """Read a file of `conf/model`."""
    return read_yaml(group_file("model", name))


def architecture_of(preset: str, sizes: Sizes) -> str:
    """Write sizes as a file of `conf/model`, or none, and what differs from it."""
    base = preset_sizes(preset) if preset else {f.name: f.default for f in fields(ModelConfig)}
    differing = {key: value for key, value in sizes.items() if value != base.get(key)}
    told = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in differing.items()]
    return " ".join([preset or "none", *told])


def sizes_of(text: str) -> Sizes:
    """Read what `architecture_of` wrote."""
    preset, *changes = text.split()
    pairs = (change.partition("=") for change in changes)
    base = {} if preset == "none" else preset_sizes(preset)
    return base | {key: json.loads(value) for key, _, value in pairs}
