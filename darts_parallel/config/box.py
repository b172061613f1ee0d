"""A machine in one line: `cluster=box gpu=rtx4090 gpus=4 nodes=1`; links follow the class of the GPU."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from darts_parallel.config.checks import as_yaml
from darts_parallel.config.trainer import group_file, group_names
from darts_parallel.config.words import given_values
from darts_parallel.errors import ConfigError, closest

BOX = "cluster=box"
INSIDE = "cluster.nodes.0.intra_node"
BETWEEN = "cluster.inter_node"
PCIE = 25.0
"""10^9 bytes a second of PCIe 4.0 x16, where a device file gives none."""
NETWORK = 12.5
"""10^9 bytes a second between nodes of GPUs on PCIe: 100 Gb/s."""
SOCKETS = {
    "a100_40": "a100_40_2x8",
    "a100_80": "a100_80_8x8",
    "b200": "b200_8x",
    "b300": "b200_8x",
    "gb200": "gb200_nvl72",
    "gb300": "gb300_nvl72",
    "h100": "h100_8x8",
    "h100_hbm2e": "h100_8x8",
    "h200": "h100_8x8",
    "mi300x": "mi300x_1x8",
    "mi325x": "mi300x_1x8",
    "mi350x": "mi300x_1x8",
    "mi355x": "mi300x_1x8",
    "v100": "v100_8x8",
    "v100_16": "v100_8x8",
}
"""Cluster with the links of a GPU that has more than PCIe."""


def with_box(arguments: Sequence[str]) -> list[str]:
    """Return overrides of a cluster of one kind of GPU in place of `gpu=NAME`; links that are given stay.

    Errors:
        ConfigError: `gpu` without `cluster=box` or the other way around, or no file of the group `device`.
    """
    given = given_values(arguments)
    gpu = given.get("gpu")
    written = any(argument.startswith("+device@cluster.devices.") for argument in arguments)
    if BOX not in arguments or written:
        if gpu is not None and not written:
            raise ConfigError(f"gpu={gpu} must go with {BOX}; try {BOX} gpu={gpu} gpus=8 nodes=1.")
        return list(arguments)
    known = group_names("device")
    if gpu not in known:
        near = closest(gpu.lower().replace(" ", ""), known) if gpu else "h100"
        rule = f"gpu={gpu} must be" if gpu else f"{BOX} needs gpu=,"
        raise ConfigError(f"{rule} one of {', '.join(known)}; try gpu={near}.")
    bus = _bus(group_file("device", gpu))
    links = {f"{INSIDE}.bandwidth_GBps": bus, f"{BETWEEN}.bandwidth_GBps": NETWORK}
    if gpu in SOCKETS:
        like = OmegaConf.load(group_file("cluster", SOCKETS[gpu]))
        links = {f"{INSIDE}.shared": False}
        links |= {f"{INSIDE}.{key}": value for key, value in like.nodes[0].intra_node.items()}
        links |= {f"{BETWEEN}.{key}": value for key, value in like.inter_node.items()}
    name = f"{given.get('nodes', 1)}x{given.get('gpus', 8)}_{gpu}"
    assumed = [f"{key}={as_yaml(value)}" for key, value in links.items()]
    named = [f"+device@cluster.devices.{gpu}={gpu}", f"cluster.nodes.0.device={gpu}"]
    others = [argument for argument in arguments if not argument.startswith("gpu=")]
    return [*named, f"cluster.name={name}", *assumed, *others]


def _bus(file: Path) -> float:
    """Return the bandwidth of a GPU's PCIe, in 10^9 bytes a second."""
    return float(OmegaConf.select(OmegaConf.load(file), "host_bandwidth_GBps") or PCIE)
