"""Hardware by the words of a row: device file, link inside a node, network between nodes."""

import re
from dataclasses import dataclass

from experiments.calibration.rows import Row, RowError


@dataclass(frozen=True)
class Network:
    """A link as the cost model takes it: 10^9 bytes/s one way, and the group whose fit it shares."""

    name: str
    bandwidth: float
    shared: bool = False
    peer_links: int = 0


NVLINK2 = Network("nvlink2", 150.0)
NVLINK3 = Network("nvlink3", 300.0)
NVLINK4 = Network("nvlink4", 450.0)
NVLINK5 = Network("nvlink5", 900.0)
NVLINK_A800 = Network("nvlink3", 200.0)
"""A800 and H800 sell with 400 GB/s both ways."""
PCIE3 = Network("pcie", 15.75, shared=True)
PCIE4 = Network("pcie", 31.5, shared=True)
PCIE5 = Network("pcie", 63.0, shared=True)
XGMI = Network("xgmi", 448.0, peer_links=7)
"""MI300X: 7 links of 64 GB/s each way, one to every other GPU of the node (data sheet)."""
XGMI_MI250 = Network("xgmi", 100.0)
"""MI250X: 50 to 200 GB/s each way between two dies of a node, by pair; the middle of it."""

GPUS: tuple[tuple[str, str, Network, float], ...] = (
    # words, device file, link inside a node (one way, a GPU), usual network out of a node (GB/s)
    (r"gb300", "gb300", NVLINK5, 400.0),
    (r"gb200", "gb200", NVLINK5, 200.0),
    (r"b300", "b300", NVLINK5, 800.0),
    (r"b200", "b200", NVLINK5, 400.0),
    (r"gh200|h200", "h200", NVLINK4, 400.0),
    (r"h800", "h100", Network("nvlink4", 200.0), 400.0),
    (r"h100(?=.*(hbm2e|500 ?w))", "h100_hbm2e", NVLINK4, 400.0),
    (r"h100(?=.*pcie)|h100-pcie", "h100_pcie", PCIE5, 50.0),
    (r"h100", "h100", NVLINK4, 400.0),
    (r"a800", "a100_80", NVLINK_A800, 100.0),
    (r"a100(?=.*pcie)", "a100_80", PCIE4, 25.0),
    (r"a100(?=.*40 ?gb)", "a100_40", NVLINK3, 200.0),
    (r"a100", "a100_80", NVLINK3, 200.0),
    (r"\ba10g?\b", "a10", PCIE4, 6.25),
    (r"v100(?=.*16 ?gb)", "v100_16", NVLINK2, 12.5),
    (r"v100", "v100", NVLINK2, 12.5),
    (r"\bt4", "t4", PCIE3, 6.25),
    (r"mi300x?|mi325x?", "mi300x", XGMI, 400.0),
    (r"mi250x?", "mi250x", XGMI_MI250, 100.0),
)
SOURCES: tuple[tuple[str, str, float], ...] = (
    # words of source or GPU, name, GB/s out of a node; each from that source's own description
    (r"bigscience|jean ?zay", "omnipath", 50.0),  # 4 x 100 Gbit/s Omni-Path a node
    (r"selene", "infiniband", 200.0),  # 8 x 200 Gbit/s HDR (arXiv 2104.04473, section 5)
    (r"dgx-2\b", "infiniband", 100.0),  # 8 x 100 Gbit/s EDR
    (r"hf cluster|hopper-prod|nanotron", "efa", 400.0),  # AWS p5: 3,200 Gbit/s EFA
    # AWS instances (their own pages): 10 Gbit/s, 25, 50, 400 EFA, 3,200 EFA
    (r"p3\.8xlarge", "ethernet", 1.25),
    (r"p3\.16xlarge", "ethernet", 3.125),
    (r"g4dn\.12xlarge", "ethernet", 6.25),
    (r"p4de?\.24xlarge", "efa", 50.0),
    (r"p5\.48xlarge", "efa", 400.0),
)
NVLINK_DOMAINS = {"gb200": 72, "gb300": 72}
"""GPUs that one NVLink switch joins where that is more than a node (NVL72 racks)."""
OMNIPATH_BEFORE_FIX = r"date 02-(1\d|2[0-4])"
"""Jean Zay's PCIe and NUMA settings were corrected on 02-25; the all-reduce before reached 40 Gbit/s."""
RATE = r"(\d+(?:\.\d+)?)\s*(gbit/s|gbps|gb/s|gb\b|g\b)"


def gpu_of(row: Row) -> tuple[str, Network, float]:
    """Device file, link inside a node and usual GB/s out of a node of the GPU that a row names.

    Errors:
        RowError: no known GPU.
    """
    text = row.text("gpu").lower().replace("_", " ")
    if not text:
        raise RowError("gpu is missing")
    for words, device, link, network in GPUS:
        if re.search(words, text):
            return device, link, network
    raise RowError(f"gpu={row.text('gpu')} is unknown; known: {', '.join(sorted({g[1] for g in GPUS}))}")


@dataclass(frozen=True)
class GpuNodes:
    """Nodes of one kind that a run uses."""

    nodes: int
    """0: all of the run's."""
    device: str
    intra: Network
    inter: Network


def node_groups(row: Row, gpus: int, gpus_per_node: int) -> list[GpuNodes]:
    """Kinds of nodes of a run: one, or those that the GPU's cell or the notes list with their numbers.

    "12 V100 + 4 T4" counts GPUs, "3 nodes of 4 V100 and 1 node of 4 T4" nodes: whichever adds up to the run's
    GPUs. Ranks follow the list.

    Errors:
        RowError: no known GPU, or kinds whose numbers do not add up.
    """
    for key in ("gpu", "notes"):
        found = _kinds(row.text(key))
        if len({device for _, device in found}) < 2:
            continue
        total = sum(count for count, _ in found)
        size = 1 if total * gpus_per_node == gpus else gpus_per_node if total == gpus else 0
        if not size or any(count % size for count, _ in found):
            if key == "gpu":
                raise RowError(f"gpu={row.text('gpu')}: several GPUs whose numbers are not those of {gpus}")
            continue
        groups = []
        for count, device in found:
            _, intra, usual = next((d, link, rate) for _, d, link, rate in GPUS if d == device)
            network = _network(row, gpus_per_node, device, usual)
            groups.append(GpuNodes(count // size, device, intra, network))
        return groups
    device, intra, inter = networks_of(row, gpus_per_node)
    return [GpuNodes(0, device, intra, inter)]


def _kinds(text: str) -> list[tuple[int, str]]:
    """Numbers and devices of a list such as `3 nodes x 4 V100-16GB + 1 node x 4 T4`."""
    found = []
    for part in re.split(r"\s*(?:\+|;|,|&|\band\b)\s*", text.lower().replace("_", " ")):
        known = next((device for words, device, _, _ in GPUS if re.search(words, part)), None)
        number = re.search(
            r"(?<![\w.])(\d+)(?![\w.])(?!\s*-?\s*(?:gb|gib))|(?<![\w.])(\d+)(?=\s*[x\u00d7])|[x\u00d7]\s*(\d+)",
            part,
        )
        if known and number:
            found.append((int(next(group for group in number.groups() if group)), known))
    return found


def _network(row: Row, gpus_per_node: int, device: str, usual: float) -> Network:
    """The link out of a node of one kind of several: its instance's, else the row's, else the usual one."""
    instances = {"v100": r"p3\.\w+", "v100_16": r"p3\.\w+", "t4": r"g4dn\.\w+"}
    text = " ".join(row.text(key) for key in ("gpu", "notes", "source")).lower()
    named = re.search(instances.get(device, "$^"), text)
    known = next((source for source in SOURCES if named and re.search(source[0], named[0])), None)
    if known is None and "amp" in text and device in ("v100", "v100_16"):
        known = ("", "ethernet", 1.25)  # AMP's V100 nodes are p3.8xlarge (arXiv 2210.07297, section 5)
    if known:
        return Network(known[1], known[2])
    printed = _printed_rate(text, gpus_per_node)
    rate = printed or usual
    return Network("ethernet" if rate <= 12.5 else "roce" if printed else "infiniband", rate)


def networks_of(row: Row, gpus_per_node: int) -> tuple[str, Network, Network]:
    """Device file, link inside a node, link between nodes.

    The network is, in this order: what the row's own notes or source print, what its cluster is known
    to have (`SOURCES`), what is usual for the GPU (`GPUS`).
    """
    device, intra, usual = gpu_of(row)
    text = " ".join(row.text(key) for key in ("notes", "source")).lower()
    inside = re.search(rf"inside\s+{RATE}", text)
    if inside:
        # a stated rate inside a node is that of the one host bridge or network that all GPUs share
        intra = Network("pcie", min(float(inside[1]) / 8.0, intra.bandwidth), shared=True)
    everywhere = f"{text} {row.text('gpu').lower()}"
    known = next((source for source in SOURCES if re.search(source[0], everywhere)), None)
    printed = _printed_rate(text, gpus_per_node)
    if printed:
        slow = printed <= 12.5
        return device, intra, Network("ethernet" if slow else "roce", printed)
    if known:
        before = known[1] == "omnipath" and re.search(OMNIPATH_BEFORE_FIX, text)
        return device, intra, Network("omnipath_before_fix" if before else known[1], known[2])
    return device, intra, Network("ethernet" if usual <= 12.5 else "infiniband", usual)


def _printed_rate(text: str, gpus_per_node: int) -> float | None:
    """GB/s out of a node that the text prints, one way."""
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
