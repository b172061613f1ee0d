"""Fitted parameters as the device files that the search reads."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from darts_parallel.config import config_dir
from darts_parallel.planfile import write_text
from experiments.measured.calibrated import Calibrated
from experiments.measured.parameters import FAMILY, QUANTITIES, Place
from experiments.measured.predict import DEVICE_FIELDS

MARK = "# Calibrated"
"""First words of the comment that this module writes; what stands above it is kept."""
SHEET = ("memory_GiB", "peak_TFLOPs", "memory_bandwidth_GBps")
NO_STACK = "default"


def device_names() -> list[str]:
    """The shipped devices but for the invented ones."""
    files = sorted((Path(config_dir()) / "device").glob("*.yaml"))
    return [file.stem for file in files if not file.stem.startswith("toy")]


def write_device(folder: Path, name: str, fitted: Calibrated, provenance: Iterable[str]) -> None:
    """Write `name`.yaml: data sheet as shipped, efficiencies as fitted for the software without a name.

    Args:
        folder: Where to; may be the shipped folder.
        provenance: Lines for the comment.
    """
    shipped = Path(config_dir()) / "device" / f"{name}.yaml"
    text = shipped.read_text(encoding="utf-8")
    comment = [line for line in text.split(MARK)[0].splitlines() if line.startswith("#")]
    sheet = OmegaConf.to_container(OmegaConf.load(shipped))
    place = Place(FAMILY.get(name, name), NO_STACK, "", "")
    lines = [*comment, *(f"# {line}" for line in provenance)]
    assert isinstance(sheet, dict)
    lines += [f"{key}: {_text(sheet[key])}" for key in SHEET]
    for quantity in QUANTITIES:
        if quantity.name in DEVICE_FIELDS:
            value = fitted.value(quantity, place.of(quantity.scope))
            lines.append(f"{quantity.name}: {value:.3g}")
    write_text(folder / f"{name}.yaml", "\n".join(lines) + "\n")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {number}" for key, number in value.items()) + "}"
    return str(value)
