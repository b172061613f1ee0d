"""Measure the machine at hand, and write a device and a cluster for the search.

    darts-parallel profile                                               # one process, one device
    torchrun --nproc-per-node 2 -m darts_parallel profile seconds=60     # one process a device
    darts-parallel --config-dir outputs/measured cluster=measured model=gpt2_xl

Every process measures its own device at the same time (matrix products by shape, memory streams, attention,
launches, Transformer blocks); then the processes of a node, and those of equal place on all nodes, time
all-reduce, all-gather and messages by size (nccl on GPUs, gloo on CPUs). Seconds are those of
torch.utils.benchmark, medians over the processes. It writes `device/NAME.yaml`, `cluster/NAME.yaml` and
`profile.json` (every measurement) into `out`, and says how far the cost model is from the measured blocks
with these figures.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from darts_parallel.config import require_at_least, require_member, require_members, run_main
from darts_parallel.cost import build_tables
from darts_parallel.errors import ConfigError
from darts_parallel.machine._compute import DTYPES, ComputeProfile, measure_compute
from darts_parallel.machine._files import cluster_yaml, device_yaml, node_memory
from darts_parallel.machine._links import LinkProfile, measure_link
from darts_parallel.machine._timing import MeasuredMachine, this_machine
from darts_parallel.plans import write_json, write_text
from darts_parallel.problem import load_problem

ROUGH = 0.5
"""Median relative error of a fit above which its figures are warned of."""


@dataclass
class ProfileOptions:
    """Command line of `darts-parallel profile`."""

    out: str = "outputs/measured"
    """A folder for `--config-dir`."""
    name: str = "measured"
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where there is one."""
    seconds: float = 60.0
    """Wall-clock of the measurements; each is repeated three times at least."""
    precisions: list[str] | None = None
    """Precisions of products, the main one first; null: fp32 on a CPU, bf16, fp16 and fp32 on a GPU."""
    largest: int | None = None
    """Rows and columns of the largest product; null: 1024 on a CPU, 8192 on a GPU."""
    largest_message_mib: float = 16.0
    """In 2^20 bytes."""

    def __post_init__(self) -> None:
        require_member("device", self.device, ("auto", "cpu", "cuda"))
        require_at_least("seconds", self.seconds, 0)
        require_at_least("largest_message_mib", self.largest_message_mib, 0, strict=True)
        if self.largest is not None:
            require_at_least("largest", self.largest, 64)
        require_members("precisions", self.precisions or (), tuple(DTYPES))
        if self.precisions is not None and not self.precisions:
            raise ConfigError("precisions=[] must list at least one; try [fp32].")
        if not self.name.isidentifier():
            raise ConfigError(
                f"name={self.name} must be letters, digits and underscores, since files and keys are "
                "called so; try measured."
            )

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`.

        Errors:
            ConfigError: a GPU is asked for and there is none.
        """
        found = torch.cuda.is_available()
        if self.device == "cuda" and not found:
            raise ConfigError("device=cuda must be there, and torch finds none; try cpu.")
        return "cuda" if found and self.device != "cpu" else "cpu"


def run(options: ProfileOptions) -> int:
    """Measure on all ranks, write on the first."""
    kind = options.kind
    precisions = options.precisions or (["fp32"] if kind == "cpu" else ["bf16", "fp16", "fp32"])
    largest = options.largest or (1024 if kind == "cpu" else 8192)
    message = int(options.largest_message_mib * 2**20)
    folder = Path(options.out)
    for part in ("device", "cluster"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with this_machine(kind) as machine:
        share = 1.0 if machine.world == 1 else 0.6
        compute = measure_compute(machine, precisions, largest, share * options.seconds)
        rest = (1 - share) * options.seconds / 2
        intra = measure_link(machine, inside=True, largest=message, seconds=rest)
        inter = measure_link(machine, inside=False, largest=message, seconds=rest)
        if machine.rank == 0:
            _write(options, machine, compute, intra, inter)
    return 0


def block_errors(folder: str, name: str, compute: ComputeProfile) -> list[tuple[str, float, float]]:
    """Return words, and `predicted / measured - 1` of forward and backward, for every measured block.

    No block has a part in the fit.

    Args:
        folder: For `--config-dir`; holds the written device and cluster.
    """
    result = []
    for layer in compute.blocks:
        if (
            layer.backward_s <= 0.0
        ):  # a difference of measurements: a loaded machine can turn it around
            continue
        width = layer.width
        problem = load_problem(
            [
                "model=gpt2_xl",
                f"cluster={name}",
                "training=toy",
                "training.fused_attention=false",
                "space=uniform",
                "space.pp=1",
                "space.tp=1",
                "space.num_micro_batches=1",
                "space.recompute=none",
                "space.zero_stage=0",
                f"model.hidden_size={width}",
                f"model.num_heads={max(width // 64, 1)}",
                "model.num_layers=1",
                f"model.max_seq_len={layer.seq_len}",
                f"training.seq_len={layer.seq_len}",
                "cluster.nodes.0.count=1",
                "cluster.nodes.0.gpus=1",
                f"training.precision={compute.gemms[0].precision}",
                f"training.global_batch_size={layer.micro_batch}",
            ],
            config_dir=folder,
        )
        (table,) = build_tables(problem)
        forward, backward = float(table.forward[0, 0, 1, 0]), float(table.backward[0, 0, 1, 0])
        words = f"width {width}, {layer.micro_batch} x {layer.seq_len} tokens"
        result.append((words, forward / layer.forward_s - 1.0, backward / layer.backward_s - 1.0))
    return result


def _write(
    options: ProfileOptions,
    machine: MeasuredMachine,
    compute: ComputeProfile,
    *links: LinkProfile | None,
) -> None:
    """Write the files; `links` are those inside and between nodes."""
    folder, name = Path(options.out), options.name
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    intra, inter = links
    write_text(
        folder / f"device/{name}.yaml", device_yaml(compute, machine, node_memory(machine), when)
    )
    write_text(
        folder / f"cluster/{name}.yaml", cluster_yaml(name, machine, intra, inter, compute, when)
    )
    measured = {
        key: [asdict(entry) for entry in getattr(compute, key)] for key in ("gemms", "blocks")
    }
    shown = {"intra_node": intra and asdict(intra), "inter_node": inter and asdict(inter)}
    write_json(folder / "profile.json", {"when": when, **measured, **shown})
    print(_summary(options, compute, {"inside nodes": intra, "between nodes": inter}))


def _summary(
    options: ProfileOptions, compute: ComputeProfile, links: Mapping[str, LinkProfile | None]
) -> str:
    device = compute.fit.device
    peaks = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in compute.fit.peaks.items())
    lines = [
        f"peak {peaks} TFLOP/s; products within {compute.fit.error:.1%} (median) of the fitted curve",
        f"memory {float(device.memory_bandwidth) / 1e9:.3g} GB/s; "
        f"a block of one token {float(device.layer_overhead) * 1e6:.3g} us",
    ]
    errors = {"products": compute.fit.error}
    for name, link in links.items():
        if link is not None:
            errors[f"links {name}"] = link.error
            speed = f"links {name}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us"
            lines.append(f"{speed}; within {link.error:.1%} (median) of the fit")
    for words, forward, backward in block_errors(options.out, options.name, compute):
        lines.append(
            f"block of {words}: forward predicted {forward:+.0%}, backward {backward:+.0%}"
        )
    for name, error in errors.items():
        if error > ROUGH:
            lines.append(
                f"warning: the fit of {name} is {error:.0%} off; measure again, on an idle machine"
            )
    small = f" model=bert_345m training.precision={next(iter(compute.fit.peaks))}"
    usable = "" if "bf16" in compute.fit.peaks else small
    lines.append(f"use: darts-parallel --config-dir {options.out} cluster={options.name}{usable}")
    return "\n".join(lines)


def main() -> int:
    """Measure as the arguments of this process say; return the exit status."""
    return run_main("darts-parallel profile", __doc__, ProfileOptions, run)
