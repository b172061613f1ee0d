"""Training text that needs no download: the bytes of the Python standard library's own source."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.errors import UnsupportedError

PARTS = ("train", "validation", "test")
SHARES = {"validation": 0.1, "test": 0.1}
"""Shares of the files; the rest is for training."""
MOST_TRAINING_BYTES = 8_000_000
EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__")
"""Folders that not every installation has, and installed packages, which are not the library."""


@dataclass(frozen=True)
class Corpus:
    """Bytes of disjoint files, uint8.

    The weights step on `train`, the logits on `validation`, and plans are judged on `test`, which no
    search sees. Each has shape `(bytes,)`.
    """

    train: Tensor
    validation: Tensor
    test: Tensor


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read all `*.py` below `folder`, each file wholly in one of the three parts.

    A file's part follows from a hash of its relative path, so that it does not depend on the order
    or on the other files.

    Args:
        folder: None takes the standard library of this Python.

    Errors:
        UnsupportedError: there is too little source, e.g. a Python that ships only compiled files.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[bytes]] = {name: [] for name in PARTS}
    for path in _sources(root):
        parts[part_of(path.relative_to(root).as_posix())].append(path.read_bytes())
    texts = {name: b"".join(files) for name, files in parts.items()}
    texts["train"] = texts["train"][:MOST_TRAINING_BYTES]
    if min(len(text) for text in texts.values()) < 10_000:
        raise UnsupportedError(
            f"bilevel: {root} holds too little Python source to train on; try a larger folder."
        )
    return Corpus(*(torch.frombuffer(bytearray(texts[name]), dtype=torch.uint8) for name in PARTS))


def _sources(root: Path) -> list[Path]:
    """Find all `*.py` in the order of their paths; excluded folders are not entered (they may be huge)."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in EXCLUDED]
        found += [Path(folder) / name for name in files if name.endswith(".py")]
    return sorted(found)


def part_of(name: str) -> str:
    """Return the part that the file of this relative path belongs to."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    for part, share in SHARES.items():
        if place < share:
            return part
        place -= share
    return "train"


def sample(
    text: Tensor,
    count: int,
    context: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw random windows of the text.

    Args:
        text: Bytes, shape `(N,)`.

    Returns:
        Bytes as int64, shape `(count, context + 1)`: inputs and, shifted by one, targets.
    """
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()
