"""Fitted link parameters in the cluster files that the search reads."""

import re
from collections.abc import Iterable
from pathlib import Path

from darts_parallel.config.schema import config_dir
from darts_parallel.plan.file import write_text
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.device_files import MARK, NO_STACK
from experiments.calibration.parameters import QUANTITIES, Place

LINKS = {300.0: "nvlink3", 450.0: "nvlink4", 150.0: "nvlink2", 900.0: "nvlink5"}
"""Link inside a node by the bandwidth of its data sheet, 10^9 bytes/s one way a GPU."""
FAST_NETWORK = 100.0
"""10^9 bytes/s out of a node from which a network between nodes is taken for InfiniBand."""
LINK = re.compile(
    r"(?P<place>intra_node|inter_node): \{bandwidth_GBps: (?P<rate>[\d.]+), "
    r"latency_us: [\d.]+, efficiency: [\d.]+\}"
)  # fmt: skip


def cluster_names() -> list[str]:
    """Shipped clusters whose links state an efficiency: those with published micro-benchmarks."""
    files = sorted((Path(config_dir()) / "cluster").glob("*.yaml"))
    return [file.stem for file in files if LINK.search(file.read_text(encoding="utf-8"))]


def write_cluster(folder: Path, name: str, fitted: Calibrated, provenance: Iterable[str]) -> None:
    """Write `name`.yaml with fitted efficiencies and latencies of its links, all else as shipped.

    Args:
        folder: Where to; may be the shipped folder.
        provenance: Lines for the comment.
    """
    text = (Path(config_dir()) / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(MARK)]
    comments = [i for i, line in enumerate(lines) if line.startswith("#")]
    end = comments[-1] + 1 if comments else 0
    lines[end:end] = [f"# {line}" for line in provenance]
    write_text(folder / f"{name}.yaml", LINK.sub(lambda found: _link(found, fitted), "\n".join(lines)) + "\n")


def _link(found: re.Match[str], fitted: Calibrated) -> str:
    inside, rate = found["place"] == "intra_node", float(found["rate"])
    known = LINKS.get(rate) if inside else "infiniband" if rate >= FAST_NETWORK else None
    if known is None:
        return found[0]
    scope = "intra" if inside else "inter"
    by_name = {quantity.name: quantity for quantity in QUANTITIES}
    place = Place("", NO_STACK, known, known)
    efficiency = fitted.value(by_name[f"{scope}_efficiency"], place)
    latency = fitted.value(by_name[f"{scope}_latency_us"], place)
    return (
        f"{found['place']}: {{bandwidth_GBps: {found['rate']}, latency_us: {latency:.2g}, "
        f"efficiency: {efficiency:.3g}}}"
    )
