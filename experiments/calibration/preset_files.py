"""Fitted parameters as the preset files that the search reads: devices, clusters, frameworks."""

import re
from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

from darts_parallel.config import group_file, group_files
from darts_parallel.planner import FAMILIES, KINDS
from darts_parallel.plans import write_text
from darts_parallel.problem import ANY, GIB, HABITS
from experiments.calibration.calibrated import QUANTITIES, Calibrated, Place, Quantity
from experiments.calibration.predict import LINK_PREFIXES, RESERVED, reserved_bytes
from experiments.calibration.problems import device_config
from experiments.data.table import frameworks

MARK = "# Calibrated"
"""First words of the comment that a device or a cluster gets; what stands above it is kept."""
DATA_SHEET = "data sheet"
NONE = "default"
"""Framework of runs that name none; no file has its figures."""
AVERAGE = ""
"""No framework: the figures of devices and clusters have no part of one."""
FAST_NETWORK = 100.0
"""10^9 bytes/s out of a node from which a network between nodes is taken for InfiniBand."""
LINK = re.compile(
    r"(?P<place>intra|inter)_node: "
    r"\{bandwidth_GBps: (?P<rate>[\d.]+), latency_us: [\d.e+]+, efficiency: [\d.]+"
)
OF_DEVICES = tuple(q for q in QUANTITIES if not q.name.startswith(LINK_PREFIXES))


def three_digits(value: float) -> str:
    """Round a figure to three digits, as YAML reads it: `1e+03`, without a point, would be a text."""
    return f"{float(f'{value:.3g}'):g}"


def write_presets(folder: Path, fitted: Calibrated, when: str) -> None:
    """Write the files of `--config-dir` into a folder, with command and date of the fit in brackets."""
    for kind in ("device", "cluster", "software"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for name in device_names():
        write_text(folder / "device" / f"{name}.yaml", device_text(name, fitted, when))
    for path in group_files("cluster"):
        text = path.read_text(encoding="utf-8")
        if LINK.search(text):
            write_text(folder / "cluster" / path.name, cluster_text(text, fitted, when))
    for name, facts in frameworks().items():
        if name != NONE and name in fitted.names("framework"):
            write_text(
                folder / "software" / f"{name}.yaml", framework_text(name, facts, fitted, when)
            )


def device_names() -> list[str]:
    """List the shipped devices whose comment names a data sheet; others are invented, and never rewritten."""
    return [
        file.stem
        for file in group_files("device")
        if DATA_SHEET in file.read_text(encoding="utf-8").replace("\n# ", " ")
    ]


def device_text(name: str, fitted: Calibrated, when: str) -> str:
    """Write a device file: data sheet as shipped, efficiencies as fitted, without a framework's part.

    Args:
        name: One of `device_names`: fitted figures stand next to those of a data sheet only.
    """
    text = group_file("device", name).read_text(encoding="utf-8")
    family = FAMILIES.get(name, name)
    own = family in fitted.names("device")
    runs = "fitted to runs on this GPU" if own else "no runs on this GPU; from those on others"
    values = fitted.at(Place(family, AVERAGE, "", ""))
    memory = device_config(name).memory_GiB
    values[RESERVED] = reserved_bytes(values[RESERVED], memory * GIB) / GIB
    figures = {q.name: three_digits(float(values[q.name])) for q in OF_DEVICES}
    # what no calibration has written
    comment = [line for line in text.split(MARK)[0].splitlines() if line.startswith("#")]
    lines = [*comment, f"{MARK} efficiencies {when}:", f"# {runs}."]
    for line in text.splitlines():
        key = line.partition(":")[0]
        if not line.startswith("#"):
            lines.append(f"{key}: {figures.pop(key)}" if key in figures else line)
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in figures.items())]) + "\n"


def cluster_text(text: str, fitted: Calibrated, when: str) -> str:
    """Write a cluster file with fitted efficiencies and latencies of its links, all else as shipped."""
    lines = [line for line in text.splitlines() if not line.startswith(MARK)]
    end = max((i + 1 for i, line in enumerate(lines) if line.startswith("#")), default=0)
    lines.insert(
        end, f"{MARK} links {when}: efficiencies and latencies of what lists an efficiency."
    )
    return LINK.sub(lambda found: _link(found, fitted), "\n".join(lines)) + "\n"


def _link(found: re.Match[str], fitted: Calibrated) -> str:
    place = found["place"]
    rate = float(found["rate"])
    fast = "infiniband" if rate >= FAST_NETWORK else None
    known = KINDS["intra"].get(rate) if place == "intra" else fast
    if known is None:
        return found[0]
    values = fitted.at(Place("", AVERAGE, known, known))
    efficiency, latency = (
        float(values[f"{place}_{name}"]) for name in ("efficiency", "latency_us")
    )
    return (
        f"{place}_node: {{bandwidth_GBps: {found['rate']}, latency_us: {latency:.1f}, "
        f"efficiency: {efficiency:.3g}"
    )


def framework_text(
    name: str,
    facts: Mapping[str, Any],
    fitted: Calibrated,
    when: str,
) -> str:
    """Write a framework's file: its habits, its own figures, and what it adds to those of a device."""
    lines = [
        f"# {name}: habits on the wire, and what was fitted to its runs.",
        f"{MARK} figures {when}.",
    ]
    habits = {key: str(facts[key]).lower() for key in HABITS if key in facts}
    lines += [f"{key}: {value}".replace("'", "") for key, value in habits.items()]
    values = fitted.at(Place("none", name, "", ""))
    offsets = []
    for quantity in OF_DEVICES:
        if "framework" not in quantity.sd:
            continue
        if quantity.name == RESERVED:
            factor = exp(fitted.mean(RESERVED, "framework", name))
            lines.append(f"reserved_factor: {three_digits(factor)}")
        elif "device" in quantity.sd and quantity.share:
            own = _offsets(quantity, name, fitted)
            cells = ", ".join(f"{device}: {three_digits(value)}" for device, value in own.items())
            offsets.append(f"  {quantity.name}: {{{cells}}}")
        else:
            lines.append(f"{quantity.name}: {three_digits(float(values[quantity.name]))}")
    return (
        "\n".join([*lines, "# added to the logit of a device's share", "offsets:", *offsets]) + "\n"
    )


def _offsets(quantity: Quantity, framework: str, fitted: Calibrated) -> Mapping[str, float]:
    """Find what a framework adds, by device file; pairs with runs count, other devices take the rest."""
    any_device = fitted.mean(quantity.name, "framework", framework)
    result = {ANY: any_device}
    for name in fitted.names("device+framework"):
        device, _, own = name.partition("+")
        if own == framework:
            files = [device, *(file for file, family in FAMILIES.items() if family == device)]
            pair = fitted.mean(quantity.name, "device+framework", name)
            result |= dict.fromkeys(files, any_device + pair)
    return result
