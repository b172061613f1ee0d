"""Measured layer times: read from CSV files that the user gives, checked, looked up by name.

`layer_forward_seconds.csv` holds the seconds of one forward pass of every layer for one micro-batch of one
sequence (columns `source, model, gpu, tp, layer_index, layer_kind, forward_s`); `micro_batch_multipliers.csv`
what a larger micro-batch multiplies them by (`model, gpu, layer_kind, micro_batch, multiplier`).
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from darts_parallel.errors import ConfigError

FORWARD_FILE = "layer_forward_seconds.csv"
MULTIPLIER_FILE = "micro_batch_multipliers.csv"
FORWARD_COLUMNS = ("source", "model", "gpu", "tp", "layer_index", "layer_kind", "forward_s")
MULTIPLIER_COLUMNS = ("model", "gpu", "layer_kind", "micro_batch", "multiplier")


@dataclass(frozen=True)
class LayerProfile:
    """Measured layers of one model on one GPU type at one tensor-parallel degree."""

    source: str
    model: str
    gpu: str
    tp: int
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

    def degrees(self, model: str, gpu: str) -> tuple[int, ...]:
        """Return measured tensor-parallel degrees, rising; none where the pair was not measured."""
        gpu = self._full_name(gpu)
        return tuple(sorted(tp for m, g, tp in self.layers if (m, g) == (model, gpu)))

    def find(self, model: str, gpu: str, tp: int) -> LayerProfile:
        """Return the layers of `model` on `gpu` at tensor-parallel degree `tp`.

        Args:
            model: As the file spells it.
            gpu: As the file spells it, or the part before a bracket (`A10` for `A10 (AWS g5)`).
            tp: Tensor-parallel degree.

        Errors:
            ConfigError: it was not measured.
        """
        models = {m for m, _, _ in self.layers}
        if model not in models:
            raise self._missing("model", model, models)
        gpu = self._full_name(gpu)
        gpus = {g for m, g, _ in self.layers if m == model}
        if gpu not in gpus:
            raise self._missing(f"gpu of model {model}", gpu, gpus)
        degrees = self.degrees(model, gpu)
        if tp not in degrees:
            near = min(degrees, key=lambda degree: abs(degree - tp))
            raise ConfigError(f"{self.path}: tp={tp} of model {model} on {gpu} must be measured; try {near}.")
        return self.layers[model, gpu, tp]

    def multiplier(self, model: str, gpu: str, kind: str, micro_batch_size: int) -> float:
        """Return the seconds of a micro-batch of `micro_batch_size` sequences over those of one sequence.

        Linear between measured sizes and proportional beyond the last one. A kind without rows of its own
        takes those of its last word (`embedding` for `encoder_embedding`); without any it is proportional.
        """
        gpu = self._full_name(gpu)
        rows = self.multipliers.get((model, gpu, kind)) or self.multipliers.get(
            (model, gpu, kind.rpartition("_")[2]), ((1, 1.0),)
        )
        last_size, last = rows[-1]
        if micro_batch_size >= last_size:
            return last * micro_batch_size / last_size
        above = next(i for i, (size, _) in enumerate(rows) if size > micro_batch_size)
        (low, below), (high, over) = rows[above - 1], rows[above]
        return below + (over - below) * (micro_batch_size - low) / (high - low)

    def _full_name(self, gpu: str) -> str:
        """Return the file's name of a GPU that is given by its first word."""
        gpus = {g for _, g, _ in self.layers}
        if gpu in gpus:
            return gpu
        return next((g for g in sorted(gpus) if g.partition(" (")[0] == gpu), gpu)

    def _missing(self, what: str, value: str, known: Iterable[str]) -> ConfigError:
        near = get_close_matches(value, sorted(known), n=1, cutoff=0.0)[0]
        return ConfigError(f"{self.path}: {what}={value} must be measured; try {near}.")


def read_profiles(folder: str | Path) -> Profiles:
    """Read both files of a folder; the multipliers may be missing.

    Errors:
        ConfigError: the folder or the layer file is missing, or a row is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"profiles={folder} must be a folder that holds {FORWARD_FILE}; try {_nearest(folder)}."
        )
    layers = read_layer_profiles(folder / FORWARD_FILE)
    second = folder / MULTIPLIER_FILE
    return Profiles(str(folder), layers, read_multipliers(second) if second.exists() else {})


def read_layer_profiles(path: str | Path) -> dict[tuple[str, str, int], LayerProfile]:
    """Read the layers of a CSV file, by model, GPU and tensor-parallel degree.

    Errors:
        ConfigError: the file is missing, a column is missing, or a row breaks a rule.
    """
    found: dict[tuple[str, str, int], list[tuple[str, str, float]]] = {}
    for line, row in read_rows(Path(path), FORWARD_COLUMNS):
        place = f"{path}, line {line}"
        key = (row["model"], row["gpu"], whole_field(place, "tp", row["tp"], 1))
        chain = found.setdefault(key, [])
        index = whole_field(place, "layer_index", row["layer_index"], 0)
        if index != len(chain):
            raise ConfigError(
                f"{place}: layer_index={index} must count up from 0 in every chain of layers; "
                f"try {len(chain)}."
            )
        if chain and chain[0][0] != row["source"]:
            raise ConfigError(
                f"{place}: source={row['source']} must be that of the chain; try {chain[0][0]}."
            )
        chain.append((row["source"], row["layer_kind"], number_field(place, "forward_s", row["forward_s"])))
    return {
        (model, gpu, tp): LayerProfile(
            rows[0][0], model, gpu, tp, tuple(kind for _, kind, _ in rows), tuple(time for _, _, time in rows)
        )
        for (model, gpu, tp), rows in found.items()
    }


def read_multipliers(path: str | Path) -> dict[tuple[str, str, str], tuple[tuple[int, float], ...]]:
    """Read micro-batch sizes and multipliers of a CSV file, by model, GPU and layer kind.

    Errors:
        ConfigError: the file is missing, a column is missing, or a row breaks a rule.
    """
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for line, row in read_rows(Path(path), MULTIPLIER_COLUMNS):
        place = f"{path}, line {line}"
        sizes = found.setdefault((row["model"], row["gpu"], row["layer_kind"]), [])
        size = whole_field(place, "micro_batch", row["micro_batch"], 1)
        least = sizes[-1][0] + 1 if sizes else 1
        if size < least or (not sizes and size != 1):
            raise ConfigError(f"{place}: micro_batch={size} must begin at 1 and rise; try {least}.")
        sizes.append((size, number_field(place, "multiplier", row["multiplier"])))
    return {key: tuple(rows) for key, rows in found.items()}


def read_rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Read line numbers and rows of a CSV file that has `columns`, at least one row."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            header = reader.fieldnames or []
            rows: list[tuple[int, dict[str, Any]]] = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); try a file with the columns {','.join(columns)}."
        ) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a CSV file ({error}); try one with the columns {','.join(columns)}."
        ) from None
    missing = [name for name in columns if name not in header]
    if missing:
        raise ConfigError(f"{path}: the column {missing[0]} is missing; try the columns {','.join(columns)}.")
    for line, row in rows:
        if None in row or None in row.values():
            raise ConfigError(
                f"{path}, line {line}: the row must have {len(header)} fields; try {','.join(header)}."
            )
    if not rows:
        raise ConfigError(f"{path}: it must hold at least one row; try {','.join(columns)}.")
    return rows


def whole_field(place: str, key: str, text: str, minimum: int) -> int:
    """Read a whole number of at least `minimum`."""
    return int(_number(place, key, text, int, minimum, f"a whole number of at least {minimum}"))


def number_field(place: str, key: str, text: str) -> float:
    """Read a finite number of at least 0."""
    return _number(place, key, text, float, 0, "a finite number of at least 0")


def _number(
    place: str, key: str, text: str, read: Callable[[str], float], minimum: float, rule: str
) -> float:
    try:
        value = read(text)
    except ValueError:
        value = float("nan")
    if isfinite(value) and value >= minimum:
        return value
    raise ConfigError(f"{place}: {key}={text} must be {rule}; try {minimum}.")


def _nearest(folder: Path) -> str:
    """Return the deepest existing folder on the way to a missing one."""
    return str(next((parent for parent in folder.absolute().parents if parent.is_dir()), Path(".")))
