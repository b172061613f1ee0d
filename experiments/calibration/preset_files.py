"""Fitted parameters as the preset files that the search reads: devices, clusters, softwares."""

import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from darts_parallel.config.schema import config_dir
from darts_parallel.plan.file import write_text
from darts_parallel.problem.software import ANY
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.parameters import FAMILY, PAIR, QUANTITIES, Place, Quantity
from experiments.calibration.predict import DEVICE_FIELDS
from experiments.calibration.stacks import Stack

MARK = "# Calibrated"
"""First words of the comment that a device or a cluster gets; what stands above it is kept."""
SHEET = ("memory_GiB", "peak_TFLOPs", "memory_bandwidth_GBps")
HOST = "host_"
"""Keys of a device file that are kept as written."""
DATA_SHEET = "data sheet"
NO_STACK = "default"
LINKS = {300.0: "nvlink3", 450.0: "nvlink4", 150.0: "nvlink2", 900.0: "nvlink5"}
"""Link inside a node by the bandwidth of its data sheet, 10^9 bytes/s one way a GPU."""
FAST_NETWORK = 100.0
"""10^9 bytes/s out of a node from which a network between nodes is taken for InfiniBand."""
LINK = re.compile(
    r"(?P<place>intra_node|inter_node): \{bandwidth_GBps: (?P<rate>[\d.]+), "
    r"latency_us: [\d.]+, efficiency: [\d.]+\}"
)  # fmt: skip
NO_DEVICE = "none"


def three_digits(value: float) -> str:
    """A figure rounded to three digits, as YAML reads it: `1e+03`, without a point, would be a text."""
    return f"{float(f'{value:.3g}'):g}"


def device_names() -> list[str]:
    """The shipped devices whose comment names a data sheet; all others are invented, and never rewritten."""
    files = sorted((Path(config_dir()) / "device").glob("*.yaml"))
    return [file.stem for file in files if names_data_sheet(file.read_text(encoding="utf-8"))]


def names_data_sheet(text: str) -> bool:
    """Whether the comment of a device file gives a data sheet as the source of its figures."""
    return DATA_SHEET in " ".join(_comment(text).replace("#", " ").split())


def _comment(text: str) -> str:
    """The comment of a device file that no calibration has written."""
    return "\n".join(line for line in text.split(MARK)[0].splitlines() if line.startswith("#"))


def write_device(folder: Path, name: str, fitted: Calibrated, provenance: Iterable[str]) -> None:
    """Write `name`.yaml: data sheet as shipped, efficiencies as fitted for the software without a name.

    Args:
        folder: Where to; may be the shipped folder.
        name: One of `device_names`: fitted figures stand beside those of a data sheet only.
        provenance: Lines for the comment.
    """
    assert name in device_names()
    shipped = Path(config_dir()) / "device" / f"{name}.yaml"
    text = shipped.read_text(encoding="utf-8")
    sheet = OmegaConf.to_container(OmegaConf.load(shipped))
    place = Place(FAMILY.get(name, name), NO_STACK, "", "")
    lines = [_comment(text), *(f"# {line}" for line in provenance)]
    assert isinstance(sheet, dict)
    lines += [f"{key}: {_text(sheet[key])}" for key in SHEET]
    for quantity in QUANTITIES:
        if quantity.name in DEVICE_FIELDS:
            value = fitted.value(quantity, place)
            lines.append(f"{quantity.name}: {three_digits(value)}")
    # links to the host are no fitted quantity, and stand with their source
    lines += [line for line in text.splitlines() if line.startswith(HOST)]
    write_text(folder / f"{name}.yaml", "\n".join(lines) + "\n")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {number}" for key, number in value.items()) + "}"
    return str(value)


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


def write_software(folder: Path, stack: Stack, fitted: Calibrated, note: str) -> None:
    """Write `NAME`.yaml: the habits of the stack, its own figures, and what it adds to those of a device.

    Args:
        folder: Where to; may be the shipped folder.
        note: Line for the comment.
    """
    lines = [f"# {stack.name}: habits on the wire, and what was fitted to its runs.", f"# {note}"]
    if stack.gradient_bytes:
        lines.append(f"gradient_bytes: {stack.gradient_bytes}")
    if stack.owner_broadcast_ms:
        lines.append(f"owner_broadcast_ms: {stack.owner_broadcast_ms:g}")
    if stack.single_ring:
        lines.append("single_ring: true")
    offsets = []
    for quantity in QUANTITIES:
        scopes = [scope for scope, _ in quantity.deviations]
        if quantity.name not in DEVICE_FIELDS or "stack" not in scopes:
            continue
        if "device" in scopes and quantity.share:
            own = ", ".join(
                f"{name}: {three_digits(value)}" for name, value in _offsets(quantity, stack, fitted).items()
            )
            offsets.append(f"  {quantity.name}: {{{own}}}")
        else:
            value = fitted.value(quantity, Place(NO_DEVICE, stack.name, "", ""))
            lines.append(f"{quantity.name}: {three_digits(value)}")
    lines += ["# added to the logit of a device's share", "offsets:", *offsets]
    write_text(folder / f"{stack.name}.yaml", "\n".join(lines) + "\n")


def _offsets(quantity: Quantity, stack: Stack, fitted: Calibrated) -> dict[str, float]:
    """What the software adds, by device file; pairs with runs count, other devices take the rest."""
    any_device = fitted.deviation(quantity.name, "stack", stack.name)
    result = {ANY: any_device}
    scope = PAIR.join(("device", "stack"))
    for name in fitted.names(scope):
        device, _, own = name.partition(PAIR)
        if own == stack.name:
            files = [device, *(file for file, family in FAMILY.items() if family == device)]
            result |= dict.fromkeys(files, any_device + fitted.deviation(quantity.name, scope, name))
    return result
