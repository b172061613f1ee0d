"""Fitted figures and known habits of a training software as the file that `training.software` reads."""

from pathlib import Path

from darts_parallel.plan.file import write_text
from darts_parallel.problem.software import ANY
from experiments.calibration.calibrated import Calibrated
from experiments.calibration.device_files import three_digits
from experiments.calibration.parameters import FAMILY, PAIR, QUANTITIES, Place, Quantity
from experiments.calibration.predict import DEVICE_FIELDS
from experiments.calibration.stacks import Stack

NO_DEVICE = "none"


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
