"""Hardware by the words of a row: device files, links inside nodes, networks between them."""

import re
from typing import Any

from experiments.data.table import RowError, TableRow
from experiments.data.words import first, tables

RATE = r"(\d+(?:\.\d+)?)\s*(gbit/s|gbps|gb/s|gb\b|g\b)"
SLOW = 12.5
"""10^9 bytes/s out of a node up to which a network is Ethernet."""
INSTANCES = {"v100": r"p3\.\w+", "v100_16": r"p3\.\w+", "t4": r"g4dn\.\w+"}
"""AWS instances by device, for clusters of several kinds."""
COUNT = r"(?<![\w.])(\d+)(?![\w.])(?!\s*-?\s*(?:gb|gib))|(?<![\w.])(\d+)(?=\s*[x\u00d7])|[x\u00d7]\s*(\d+)"

Link = tuple[str, float]
"""Name whose fit it shares, and 10^9 bytes/s."""


def hardware(row: TableRow, gpus: int, gpus_per_node: int) -> dict[str, Any]:
    """Fill the fields of a run's hardware; ranks follow the kinds of nodes in their order.

    "12 V100 + 4 T4" counts GPUs, "3 nodes of 4 V100 and 1 node of 4 T4" nodes: whichever adds up to the run's
    GPUs.

    Errors:
        RowError: no known GPU, or kinds whose numbers do not add up.
    """
    used = _gpus_of_node(gpus, gpus_per_node)
    kinds = _several(row, gpus, gpus_per_node) or [(gpus // used, *_only(row, gpus_per_node))]
    nodes, devices, intra, inter = zip(*kinds, strict=True)
    names = ("intra_links", "intra_GBps", "inter_links", "inter_GBps")
    links = (*zip(*intra, strict=True), *zip(*inter, strict=True))
    return {"gpus": gpus, "gpus_per_node": used, "devices": devices, "nodes": nodes,
            **dict(zip(names, links, strict=True))}  # fmt: skip


def _gpus_of_node(gpus: int, gpus_per_node: int) -> int:
    """Count the GPUs used on each node: whole nodes, else the largest equal share of them."""
    if gpus <= gpus_per_node:
        return gpus
    return next(n for n in range(gpus_per_node, 0, -1) if gpus % n == 0)


def _only(row: TableRow, gpus_per_node: int) -> tuple[str, Link, Link]:
    """Find device and links of a cluster of one kind.

    The network is, in this order: what the row's own notes or source print, what its cluster is known to
    have (`networks`), what is usual for the GPU (`gpus`).
    """
    if not row.text("gpu"):
        raise RowError("gpu is missing")
    gpu = first("gpus", row.words("gpu").replace("_", " "))
    if gpu is None:
        devices = sorted({entry["device"] for entry in tables()["gpus"]})
        raise RowError(f"gpu={row.text('gpu')} is unknown; known: {', '.join(devices)}")
    text = row.words("notes", "source")
    intra = (gpu["link"], gpu["inside"])
    inside = re.search(rf"inside\s+{RATE}", text)
    if inside:
        # a stated rate inside a node is that of the one host bridge or network that all GPUs share
        intra = ("pcie", min(float(inside[1]) / 8.0, gpu["inside"]))
    known = first("networks", f"{text} {row.words('gpu')}")
    printed = _printed_rate(text, gpus_per_node)
    if printed:
        return gpu["device"], intra, ("ethernet" if printed <= SLOW else "roce", printed)
    if known:
        return gpu["device"], intra, (known["network"], known["out"])
    return gpu["device"], intra, ("ethernet" if gpu["out"] <= SLOW else "infiniband", gpu["out"])


def _several(row: TableRow, gpus: int, gpus_per_node: int) -> list[tuple[int, str, Link, Link]]:
    """Find the kinds of nodes that the GPU's cell or the notes list with their numbers; none where one."""
    for key in ("gpu", "notes"):
        found = _listed(row.text(key))
        if len({entry["device"] for _, entry in found}) < 2:
            continue
        total = sum(count for count, _ in found)
        size = 1 if total * gpus_per_node == gpus else gpus_per_node if total == gpus else 0
        if size and not any(count % size for count, _ in found):
            return [
                (
                    count // size,
                    gpu["device"],
                    (gpu["link"], gpu["inside"]),
                    _network(row, gpus_per_node, gpu),
                )
                for count, gpu in found
            ]
        if key == "gpu":
            raise RowError(f"gpu={row.text('gpu')}: several GPUs whose numbers are not those of {gpus}")
    return []


def _listed(text: str) -> list[tuple[int, dict[str, Any]]]:
    """Read numbers and GPUs of a list such as `3 nodes x 4 V100-16GB + 1 node x 4 T4`."""
    found = []
    for part in re.split(r"\s*(?:\+|;|,|&|\band\b)\s*", text.lower().replace("_", " ")):
        known, number = first("gpus", part), re.search(COUNT, part)
        if known and number:
            found.append((int(next(group for group in number.groups() if group)), known))
    return found


def _network(row: TableRow, gpus_per_node: int, gpu: dict[str, Any]) -> Link:
    """Find the link out of a node of one kind of several: its instance's, else the row's, else the usual."""
    text, device = row.words("gpu", "notes", "source"), gpu["device"]
    named = re.search(INSTANCES.get(device, "$^"), text)
    known = first("networks", named[0]) if named else None
    if known:
        return known["network"], known["out"]
    if "amp" in text and device in ("v100", "v100_16"):
        return "ethernet", 1.25  # AMP's V100 nodes are p3.8xlarge (arXiv 2210.07297, section 5)
    printed = _printed_rate(text, gpus_per_node)
    rate = printed or gpu["out"]
    return "ethernet" if rate <= SLOW else "roce" if printed else "infiniband", rate


def _printed_rate(text: str, gpus_per_node: int) -> float | None:
    """Read the 10^9 bytes/s out of a node, one way, that a text prints."""
    several = re.search(rf"(\d+)\s*x\s*{RATE}", text)
    if several and "dgx" not in text[: several.start()][-6:]:
        return int(several[1]) * float(several[2]) / 8.0
    each = re.search(rf"{RATE}\s+per\s+gpu", text)
    if each:
        return float(each[1]) / 8.0 * gpus_per_node
    whole = re.search(rf"inter-node\s+{RATE}", text) or re.search(
        rf"{RATE}\s+(?:node-node|inter-?node)", text
    )
    return float(whole[1]) / 8.0 if whole else None
