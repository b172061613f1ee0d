"""A machine in one line: `cluster=box gpu=rtx4090 gpus=4 nodes=1`; links follow the class of the GPU."""

import re
from collections.abc import Sequence

from darts_parallel.config.checks import as_yaml
from darts_parallel.config.trainer import group_file, group_names, read_yaml
from darts_parallel.config.words import NAMES, given_values
from darts_parallel.errors import ConfigError, Entries, closest

BOX = "cluster=box"
INSIDE = "cluster.nodes.0.intra_node"
BETWEEN = "cluster.inter_node"
PCIE = 25.0
"""10^9 bytes a second of PCIe 4.0 x16, where a device file gives none."""
NETWORK = 12.5
"""10^9 bytes a second between nodes of GPUs on PCIe: 100 Gb/s."""

BOARD_WORDS = re.compile(r"nvidia|tesla|geforce|amd|instinct|sxm\d?|hbm\de?|oam|[^a-z0-9]")
"""Parts of the names of GPUs that say maker or socket, and signs."""


def with_box(arguments: Sequence[str]) -> list[str]:
    """Return overrides of a cluster of one kind of GPU in place of `gpu=NAME`; links that are given stay.

    Errors:
        ConfigError: `gpu` without `cluster=box` or the other way around, or no file of the group `device`.
    """
    given = given_values(arguments)
    gpu = given.get("gpu")
    size = f"gpus={given.get('gpus', 8)} nodes={given.get('nodes', 1)}"
    written = any(argument.startswith("+device@cluster.devices.") for argument in arguments)
    if BOX not in arguments or written:
        if gpu is not None and not written:
            raise ConfigError(f"gpu={gpu} must go with {BOX}; try {BOX} gpu={gpu} {size}.")
        return list(arguments)
    known = group_names("device")
    if gpu not in known:
        plain = BOARD_WORDS.sub("", gpu.lower()) if gpu else "h100"
        near = NAMES["gpus"].get(plain) or closest(plain, known)
        rule = f"gpu={gpu} must be" if gpu else f"{BOX} needs gpu=,"
        raise ConfigError(
            f"{rule} one of {', '.join(known)}; try gpu={near}, or for another GPU a file of your own "
            "(docs/how-to/own-cluster.md)."
        )
    bus = read_yaml(group_file("device", gpu)).get("host_bandwidth_GBps", PCIE)
    links: Entries = {f"{INSIDE}.bandwidth_GBps": bus, f"{BETWEEN}.bandwidth_GBps": NETWORK}
    if (like := NAMES["boards"].get(gpu)) is not None:
        cluster = read_yaml(group_file("cluster", like))
        inside = {"shared": False, **cluster["nodes"][0]["intra_node"]}
        links = {f"{INSIDE}.{key}": value for key, value in inside.items()}
        links |= {f"{BETWEEN}.{key}": value for key, value in cluster["inter_node"].items()}
    name = f"{given.get('nodes', 1)}x{given.get('gpus', 8)}_{gpu}"
    assumed = [f"{key}={as_yaml(value)}" for key, value in links.items()]
    named = [f"+device@cluster.devices.{gpu}={gpu}", f"cluster.nodes.0.device={gpu}"]
    others = [argument for argument in arguments if not argument.startswith("gpu=")]
    return [*named, f"cluster.name={name}", *assumed, *others]
