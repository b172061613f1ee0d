"""Checkpoints that are there whole or not at all, and that a resumed run can trust.

A file is a line with the SHA-256 of the rest, then the rest. It appears under its name only after
its bytes are on disk; the last two are kept, so that one of them survives whatever happens to the other.
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from darts_parallel.errors import DartsParallelError

KEPT = 2
MAGIC = b"darts-parallel checkpoint 1 "


class CheckpointError(DartsParallelError):
    """A checkpoint that is not what was written."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state of `step` and delete all but the last two.

    Args:
        folder: Of this run; made if it is not there.
        step: Orders the checkpoints.
        state: Tensors, numbers and texts in dictionaries, lists and tuples.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    path = folder / f"step-{step:08d}.ckpt"
    handle, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave the new name on old bytes
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    for old in checkpoints(folder)[:-KEPT]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of the folder, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read one checkpoint.

    Errors:
        CheckpointError: it is cut short, changed, or of another kind.
    """
    head, _, payload = path.read_bytes().partition(b"\n")
    digest = hashlib.sha256(payload).hexdigest().encode()
    if not head.startswith(MAGIC):
        raise CheckpointError(
            f"checkpoint {path} is refused: it does not begin as a checkpoint of this version."
        )
    if head != MAGIC + digest:
        raise CheckpointError(f"checkpoint {path} is refused: its bytes do not match its checksum.")
    state = torch.load(io.BytesIO(payload), weights_only=True)
    assert isinstance(state, dict)
    return state


def load_latest(folder: Path, on_refused: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest checkpoint that is whole; None where there is none.

    Args:
        folder: Of this run.
        on_refused: Receives one sentence for each checkpoint that is passed over.
    """
    for path in reversed(checkpoints(folder)):
        try:
            return load_checkpoint(path)
        except CheckpointError as error:
            on_refused(f"{error} The one before it is used.")
    return None
