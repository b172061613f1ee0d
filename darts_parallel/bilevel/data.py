"""Training text that needs no download: the bytes of the Python standard library's own source."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.errors import UnsupportedError

VALIDATION_SHARE = 0.1
EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__")
"""Folders that not every installation has, and installed packages, which are not the library."""


@dataclass(frozen=True)
class Corpus:
    """Bytes of disjoint files, uint8."""

    train: Tensor
    """Shape `(train bytes,)`."""
    validation: Tensor
    """Shape `(validation bytes,)`."""


def load_corpus(folder: Path | None = None, max_bytes: int = 8_000_000) -> Corpus:
    """Read all `*.py` below `folder`, each file wholly in one of the two parts.

    A file's part follows from a hash of its relative path, so that it does not depend on the order
    or on the other files.

    Args:
        folder: None takes the standard library of this Python.
        max_bytes: Training bytes are cut here, whole files first.

    Errors:
        UnsupportedError: there is too little source, e.g. a Python that ships only compiled files.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not any(part in EXCLUDED for part in relative.parts):
            parts[is_validation(relative.as_posix())].append(path.read_bytes())
    train, validation = b"".join(parts[False])[:max_bytes], b"".join(parts[True])
    if min(len(train), len(validation)) < 10_000:
        raise UnsupportedError(
            f"bilevel: {root} holds too little Python source to train on; give another folder."
        )
    return Corpus(_bytes(train), _bytes(validation))


def is_validation(name: str) -> bool:
    """Whether the file of this relative path belongs to the validation part."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def sample(text: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Random windows of the text.

    Args:
        text: Bytes, shape `(N,)`.
        count: Sequences.
        context: Predicted bytes of each.
        generator: Of the window positions.

    Returns:
        Bytes as int64, shape `(count, context + 1)`: inputs and, shifted by one, targets.
    """
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()


def unigram_entropy(text: Tensor) -> float:
    """Entropy of single bytes, nats: the loss of a model that knows only their frequencies."""
    shares = torch.bincount(text.long(), minlength=256).double() / len(text)
    return float(torch.special.entr(shares).sum())


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
