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


NVLINK2 = Network("nvlink2", 150.0)
NVLINK3 = Network("nvlink3", 300.0)
NVLINK4 = Network("nvlink4", 450.0)
NVLINK5 = Network("nvlink5", 900.0)
NVLINK_A800 = Network("nvlink3", 200.0)
"""A800 and H800 sell with 400 GB/s both ways."""
PCIE3 = Network("pcie", 15.75, shared=True)
PCIE4 = Network("pcie", 31.5, shared=True)
PCIE5 = Network("pcie", 63.0, shared=True)
XGMI = Network("xgmi", 448.0)
"""MI300X: 7 links of 64 GB/s each way, one to every other GPU of the node (data sheet)."""
XGMI_MI250 = Network("xgmi", 100.0)
"""MI250X: 50 to 200 GB/s each way between two dies of a node, by pair; the middle of it."""

GPUS: tuple[tuple[str, str, Network, float], ...] = (
    # words, device file, link inside a node (one way, a GPU), usual network out of a node (GB/s)
    (r"gb200|gb300", "gb200", NVLINK5, 200.0),
    (r"b200|b300", "b200", NVLINK5, 400.0),
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
)
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
