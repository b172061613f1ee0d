"""Fitted parameters as the device files that the search reads."""

from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf

from darts_parallel.config.schema import config_dir
from darts_parallel.plan.file import write_text
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.parameters import FAMILY, QUANTITIES, Place
from experiments.calibration.predict import DEVICE_FIELDS

MARK = "# Calibrated"
"""First words of the comment that this module writes; what stands above it is kept."""
SHEET = ("memory_GiB", "peak_TFLOPs", "memory_bandwidth_GBps")
HOST = "host_"
"""Keys of a device file that are kept as written."""
DATA_SHEET = "data sheet"
NO_STACK = "default"


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
