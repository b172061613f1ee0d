"""Facts by the words of a row: the tables of `words.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from experiments.data.table import TableRow


@dataclass(frozen=True)
class Framework:
    """Facts of one training framework; `words.yaml` says what they mean."""

    name: str
    family: str
    words: str
    fused_attention: bool = True
    sequence_parallel: bool = True
    tie_embeddings: bool | None = None
    gradient_bits: int | None = None
    owner_broadcast_ms: float = 0.0
    single_ring: bool = False
    instead: str = ""
    """Framework that counts in its place on the GPUs of `where_gpu`."""
    where_gpu: str = ""


@lru_cache(maxsize=1)
def tables() -> Mapping[str, list[dict[str, Any]]]:
    """Read all tables."""
    text = Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load(text)  # type: ignore[no-untyped-call]
    return found


def first(table: str, text: str) -> dict[str, Any] | None:
    """Return the first entry of a table whose words are in a text."""
    return next((entry for entry in tables()[table] if re.search(entry["words"], text)), None)


@lru_cache(maxsize=1)
def frameworks() -> Mapping[str, Framework]:
    """Return the known frameworks by name, the common one last."""
    return {entry["name"]: Framework(**entry) for entry in tables()["frameworks"]}


def framework_of(row: TableRow) -> Framework:
    """Return the framework that a row's words name, else the common one."""
    text = row.words("source", "model", "notes", "zero")
    found = next(known for known in frameworks().values() if re.search(known.words, text))
    if found.instead and re.search(found.where_gpu, row.words("gpu")):
        return frameworks()[found.instead]
    return found
