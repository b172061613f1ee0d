"""Measured layer times: read from CSV files that the user gives, checked, looked up by name.

`layer_forward_seconds.csv` holds the seconds of one forward pass of every layer for one micro-batch of one
sequence (columns `model, gpu, tp, layer_index, layer_kind, forward_s`); `micro_batch_multipliers.csv` what a
larger micro-batch multiplies them by (`model, gpu, layer_kind, micro_batch, multiplier`).
"""

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite, nan
from pathlib import Path
from typing import Any

from darts_parallel.errors import ConfigError

FORWARD_FILE = "layer_forward_seconds.csv"
MULTIPLIER_FILE = "micro_batch_multipliers.csv"
FORWARD_COLUMNS = ("model", "gpu", "tp", "layer_index", "layer_kind", "forward_s")
MULTIPLIER_COLUMNS = ("model", "gpu", "layer_kind", "micro_batch", "multiplier")
WHOLE = {"tp": 1, "layer_index": 0, "micro_batch": 1, "seq_len": 1}
"""Columns of whole numbers, and the least of each."""
REAL = ("forward_s", "backward_s", "saved_bytes", "multiplier")
"""Columns of finite numbers of at least 0."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured layers of one model on one GPU type at one tensor-parallel degree."""

    gpu: str
    kinds: tuple[str, ...]
    """Kind of every layer, in the order of the chain; empty text where the source names none."""
    forward_s: tuple[float, ...]
    """Seconds of a forward pass of one micro-batch of one sequence, by layer."""


@dataclass(frozen=True)
class Profiles:
    """All measurements of a folder."""

    path: str
    """Where they were read from, for messages."""
    layers: Mapping[tuple[str, str, int], LayerProfile]
    """Layers by model, GPU and tensor-parallel degree."""
    multipliers: Mapping[tuple[str, str, str], tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Rising micro-batch sizes and multipliers, by model, GPU and layer kind."""

    def find(self, model: str, gpu: str, tp: int) -> LayerProfile:
        """Return the layers of a model on a GPU, as `matching_name` finds them, at a tensor-parallel degree.

        Errors:
            ConfigError: it was not measured.
        """
        model = matching_name("model", model, {m for m, _, _ in self.layers}, self.path)
        gpu = matching_name(
            f"gpu of model {model}", gpu, {g for m, g, _ in self.layers if m == model}, self.path
        )
        degrees = sorted(degree for m, g, degree in self.layers if (m, g) == (model, gpu))
        if tp not in degrees:
            near = min(degrees, key=lambda degree: abs(degree - tp))
            raise ConfigError(f"{self.path}: tp={tp} of model {model} on {gpu} must be measured; try {near}.")
        return self.layers[model, gpu, tp]

    def multiplier(self, model: str, gpu: str, kind: str, micro_batch_size: int) -> float:
        """Return the seconds of a micro-batch of `micro_batch_size` sequences over those of one sequence.

        Linear between measured sizes and proportional beyond the last one. A kind without rows of its own
        takes those of its last word (`embedding` for `encoder_embedding`); without any it is proportional.
        """
        rows = self.multipliers.get((model, gpu, kind)) or self.multipliers.get(
            (model, gpu, kind.rpartition("_")[2]), ((1, 1.0),)
        )
        last_size, last = rows[-1]
        if micro_batch_size >= last_size:
            return last * micro_batch_size / last_size
        above = next(i for i, (size, _) in enumerate(rows) if size > micro_batch_size)
        (low, below), (high, over) = rows[above - 1], rows[above]
        return below + (over - below) * (micro_batch_size - low) / (high - low)


def matching_name(key: str, name: str, known: Collection[str], path: str) -> str:
    """Return the name of `known` that is `name` but for case, punctuation, a bracket and a unit of memory.

    Errors:
        ConfigError: there is none.
    """
    if name in known:
        return name
    plain = _plain(name)
    for candidate in sorted(known):
        if _plain(candidate.partition(" (")[0]) in (plain, plain + "gb"):
            return candidate
    near = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"{key}={name} must be one of {', '.join(sorted(known))}, which {path} measured; try {near}."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_profiles(source: str | Path) -> Profiles:
    """Read a file of layers, or both files of a folder, of which the multipliers may be missing.

    Errors:
        ConfigError: the folder or the layer file is missing, or a row is broken.
    """
    path = Path(source)
    if path.is_file():
        return Profiles(str(path), _read_layers(path))
    if not path.is_dir():
        near = next(parent for parent in path.absolute().parents if parent.is_dir())
        raise ConfigError(f"profiles={path} must be a folder that holds {FORWARD_FILE}; try {near}.")
    layers, second = _read_layers(path / FORWARD_FILE), path / MULTIPLIER_FILE
    return Profiles(str(path), layers, _read_multipliers(second) if second.exists() else {})


def _read_layers(path: Path) -> dict[tuple[str, str, int], LayerProfile]:
    found: dict[tuple[str, str, int], list[tuple[str, float]]] = {}
    for place, row in read_rows(path, FORWARD_COLUMNS):
        chain = found.setdefault((row["model"], row["gpu"], row["tp"]), [])
        if row["layer_index"] != len(chain):
            raise ConfigError(
                f"{place}: layer_index={row['layer_index']} must count up from 0 in every chain of layers; "
                f"try {len(chain)}."
            )
        chain.append((row["layer_kind"], row["forward_s"]))
    return {key: LayerProfile(key[1], *zip(*chain, strict=True)) for key, chain in found.items()}


def _read_multipliers(path: Path) -> dict[tuple[str, str, str], tuple[tuple[int, float], ...]]:
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for place, row in read_rows(path, MULTIPLIER_COLUMNS):
        sizes = found.setdefault((row["model"], row["gpu"], row["layer_kind"]), [])
        size, least = row["micro_batch"], sizes[-1][0] + 1 if sizes else 1
        if size < least or (not sizes and size != 1):
            raise ConfigError(f"{place}: micro_batch={size} must begin at 1 and rise; try {least}.")
        sizes.append((size, row["multiplier"]))
    return {key: tuple(rows) for key, rows in found.items()}


def read_rows(
    path: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """Read the rows of a CSV file, at least one, each with its place for messages.

    Args:
        columns: Which the file must have; `WHOLE` and `REAL` ones are read as numbers.
        optional: Which are read as numbers where the file has them.

    Errors:
        ConfigError: the file is missing, a column is missing, or a row breaks a rule.
    """
    names = f"the columns {','.join(columns)}"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            header = reader.fieldnames or []
            rows: list[tuple[str, dict[str, Any]]] = [
                (f"{path}, line {reader.line_num}", row) for row in reader
            ]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); try a file with {names}.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV file ({error}); try one with {names}.") from None
    missing = [name for name in columns if name not in header]
    if missing:
        raise ConfigError(f"{path}: the column {missing[0]} is missing; try {names}.")
    if not rows:
        raise ConfigError(f"{path}: it must hold at least one row; try {names}.")
    for place, row in rows:
        if None in row or None in row.values():
            raise ConfigError(f"{place}: the row must have {len(header)} fields; try {','.join(header)}.")
        for key in set(row) & {*columns, *optional} & {*WHOLE, *REAL}:
            row[key] = _number(place, key, row[key])
    return rows


def _number(place: str, key: str, text: str) -> float:
    whole, least = key in WHOLE, WHOLE.get(key, 0)
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = nan
    if isfinite(value) and value >= least:
        return value
    kind = "whole" if whole else "finite"
    raise ConfigError(f"{place}: {key}={text} must be a {kind} number of at least {least}; try {least}.")
