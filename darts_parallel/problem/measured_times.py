"""Measured layer times in the place of the analytic ones (`cost=profiled`).

A source is a folder of CSV files, or one file that also holds `micro_batch` and what was measured
at it (`backward_s`, `saved_bytes`). Of a folder, `layer_forward_seconds.csv` holds the seconds of
one forward pass of every layer for one micro-batch of one sequence (columns `model, gpu, tp,
layer_index, layer_kind, forward_s`); `micro_batch_multipliers.csv` what a larger micro-batch
multiplies them by (`model, gpu, layer_kind, micro_batch, multiplier`). Where a source has no
backward times, backward is twice forward. Layers of kinds that were not measured keep the analytic
formulas, and so does all communication.
"""

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from darts_parallel.config import CostConfig
from darts_parallel.errors import ConfigError, closest, read_text, require_listed

FORWARD_FILE = "layer_forward_seconds.csv"
MULTIPLIER_FILE = "micro_batch_multipliers.csv"
FORWARD_COLUMNS = ("model", "gpu", "tp", "layer_index", "layer_kind", "forward_s")
MULTIPLIER_COLUMNS = ("model", "gpu", "layer_kind", "micro_batch", "multiplier")
WHOLE = {"tp": 1, "layer_index": 0, "micro_batch": 1, "seq_len": 1, "length": 1}
"""Columns of whole numbers, and the least of each."""
REAL = {"forward_s": 0.0, "backward_s": 0.0, "saved_bytes": 0.0, "multiplier": 0.0, "count": 1e-9}
"""Columns of finite numbers, and the least of each."""
Figures = tuple[float, ...]
"""A figure of every layer, or of every micro-batch size."""
Multipliers = Mapping[tuple[str, str, str], tuple[tuple[int, float], ...]]
"""Rising micro-batch sizes and multipliers, by model, GPU and layer kind."""
PlacedRows = list[tuple[str, dict[str, Any]]]
"""Rows of a CSV file, each with its place for messages."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured layers of one model on one GPU type at one tensor-parallel degree."""

    gpu: str
    kinds: tuple[str, ...]
    """Kind of every layer, in the order of the chain; empty text where the source names none."""
    forward_s: Figures
    """Seconds of a forward pass of one micro-batch of one sequence, by layer."""


@dataclass(frozen=True)
class Profiles:
    """All measurements of a folder."""

    path: str
    """Where they were read from, for messages."""
    layers: Mapping[tuple[str, str, int], LayerProfile]
    """Layers by model, GPU and tensor-parallel degree."""
    multipliers: Multipliers = field(default_factory=dict)

    def find(self, model: str, gpu: str, tp: int) -> LayerProfile:
        """Return the layers of a model on a GPU at a tensor-parallel degree (`matching_name`).

        Errors:
            ConfigError: it was not measured.
        """
        layers = self.layers
        model = matching_name("model", model, {m for m, _, _ in layers}, self.path)
        gpus = {g for m, g, _ in layers if m == model}
        gpu = matching_name(f"gpu of model {model}", gpu, gpus, self.path)
        degrees = sorted(degree for m, g, degree in layers if (m, g) == (model, gpu))
        rule = f"{self.path}: tp={tp} of model {model} on {gpu} must be measured"
        require_listed(tp, degrees, rule, ConfigError)
        return layers[model, gpu, tp]

    def multiplier(self, model: str, gpu: str, kind: str, micro_batch_size: int) -> float:
        """Return the seconds of a micro-batch over the seconds of one sequence.

        Linear between measured sizes and proportional beyond the last one. A kind without rows of
        its own
        takes those of its last word (`embedding` for `encoder_embedding`); without any it is
        proportional.
        """
        own = (self.multipliers.get((model, gpu, name)) for name in (kind, kind.rpartition("_")[2]))
        rows = next(filter(None, own), ((1, 1.0),))
        sizes, factors = zip(*rows, strict=True)
        beyond = max(micro_batch_size / sizes[-1], 1.0)
        return float(np.interp(micro_batch_size, sizes, factors) * beyond)


def matching_name(key: str, name: str, known: Collection[str], path: str) -> str:
    """Return the known name that equals `name` but for case, punctuation, brackets and GB.

    Errors:
        ConfigError: there is none.
    """
    if name in known:
        return name
    plain = _plain(name)
    for candidate in sorted(known):
        if _plain(candidate.partition(" (")[0]) in (plain, plain + "gb"):
            return candidate
    near = closest(name, sorted(known))
    names = ", ".join(sorted(known))
    raise ConfigError(f"{key}={name} must be one of {names}, which {path} measured; try {near}.")


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
        raise ConfigError(
            f"cost.profile={path} must be a CSV file, or a folder that holds {FORWARD_FILE}; "
            "try cost=analytic, which needs none."
        )
    layers = _read_layers(path / FORWARD_FILE)
    second = path / MULTIPLIER_FILE
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


def _read_multipliers(path: Path) -> Multipliers:
    found: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for place, row in read_rows(path, MULTIPLIER_COLUMNS):
        sizes = found.setdefault((row["model"], row["gpu"], row["layer_kind"]), [])
        size = row["micro_batch"]
        least = sizes[-1][0] + 1 if sizes else 1
        if size < least or (not sizes and size != 1):
            raise ConfigError(f"{place}: micro_batch={size} must begin at 1 and rise; try {least}.")
        sizes.append((size, row["multiplier"]))
    return {key: tuple(rows) for key, rows in found.items()}


def read_rows(
    path: str | Path, columns: Sequence[str], optional: Sequence[str] = (), key: str = ""
) -> PlacedRows:
    """Read the rows of a CSV file, at least one, each with its place for messages.

    Args:
        columns: Which the file must have; `WHOLE` and `REAL` ones are read as numbers.
        optional: Which are read as numbers where the file has them.
        key: What stands before the path in messages, e.g. `training.lengths=`.

    Errors:
        ConfigError: the file is missing, a column is missing, or a row breaks a rule.
    """
    names = f"the columns {','.join([*columns, *optional])}"
    shown = f"{key}{path}"
    try:
        reader = csv.DictReader(
            read_text(path).splitlines(keepends=True), strict=True, skipinitialspace=True
        )
        header = reader.fieldnames or []
        rows = [(f"{shown}, line {reader.line_num}", row) for row in reader]
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read ({error.strerror or error}); try a file with {names}."
        ) from None
    except (csv.Error, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown} is not a CSV file ({error}); try one with {names}.") from None
    if ";" in "".join(header):
        raise ConfigError(f"{shown}: commas must divide its columns, not semicolons; try {names}.")
    missing = [name for name in columns if name not in header]
    if missing:
        raise ConfigError(f"{shown}: the column {missing[0]} is missing; try {names}.")
    if not rows:
        raise ConfigError(f"{shown}: it must hold at least one row; try {names}.")
    for place, row in rows:
        if None in row or None in row.values():
            raise ConfigError(
                f"{place}: the row must have {len(header)} fields; try {','.join(header)}."
            )
        for key in set(row) & {*columns, *optional} & {*WHOLE, *REAL}:
            row[key] = _number(place, key, row[key])
    return rows


def _number(place: str, key: str, text: str) -> float:
    whole = key in WHOLE
    least = WHOLE[key] if whole else REAL[key]
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = nan
    if isfinite(value) and value >= least:
        return value
    kind = "whole" if whole else "finite"
    raise ConfigError(
        f"{place}: {key}={text} must be a {kind} number of at least {least:g}; try {least:g}."
    )


KINDS = {
    "transformer": "block",
    "encoder_embedding": "embedding",
    "embed2h": "embedding",
    "post_process": "head",
}
"""Kinds of layer that profiles of other planners call otherwise."""
SIZED_COLUMNS = (
    "model",
    "gpu",
    "tp",
    "layer_kind",
    "micro_batch",
    "seq_len",
    "forward_s",
    "backward_s",
)
SIZED_FIGURES = ("forward_s", "backward_s", "saved_bytes")
"""Columns of measured figures, in the order of `Measured`."""
COLLECTIVES = ("included", "excluded")
"""Whether measured times hold the collectives of tensor parallelism."""
BACKWARD_FACTOR = 2.0
"""Backward over forward where only forward was measured (two products for each one)."""


@dataclass(frozen=True)
class Measured:
    """One kind of layer at one tensor-parallel degree, by micro-batch size.

    `sizes` rise; `forward`, `backward` are seconds, `saved` bytes kept for backward, or None where
    they were not measured; all of equal length.
    """

    sizes: Figures
    forward: Figures
    backward: Figures
    saved: Figures | None = None
    tp_forward: Figures | None = None
    """Seconds of the collectives of tensor parallelism."""
    tp_backward: Figures | None = None


KindTimes = Mapping[tuple[str, int], Measured]
"""Measurements by kind of layer and tensor-parallel degree."""
TimesBySource = dict[tuple[str, str], dict[tuple[str, int], Measured]]
"""Measurements by model and GPU, then as `KindTimes`."""


@dataclass(frozen=True)
class MeasuredTimes:
    """Measurements of one model, by device name, kind of layer and tensor-parallel degree.

    A kind with `+sp` behind it has the figures of strategies with sequence parallelism.
    """

    path: str
    by_device: Mapping[str, KindTimes]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that every device was measured at, rising."""
        sets = [{tp for _, tp in entries} for entries in self.by_device.values()]
        return tuple(sorted(set.intersection(*sets)))

    def figures(
        self, device: str, kind: str, degrees: tuple[Tensor, Tensor], sizes: Tensor, name: str
    ) -> Tensor | None:
        """Return a field of `Measured` of one micro-batch, `(O, C)`; None if it was not measured.

        Linear between measured sizes, proportional beyond the largest, constant below the smallest.

        Args:
            degrees: `tp` and ranks that share the sequence outside its region, each of shape
                `(C,)`.
            sizes: Sequences of a micro-batch, shape `(O, C)`.
        """
        entries = self.by_device[device]
        pairs = zip(*(d.tolist() for d in degrees), strict=True)
        names = [(f"{kind}+sp" if shards > 1 else kind, int(tp)) for tp, shards in pairs]
        rows = [entries.get((name, tp), entries.get((kind, tp))) for name, tp in names]
        known = [(row.sizes, getattr(row, name)) for row in rows if row is not None]
        if len(known) < len(rows) or any(values is None for _, values in known):
            return None
        return torch.stack([_interpolate(*row, sizes[:, c]) for c, row in enumerate(known)], 1)


def _interpolate(known: Figures, values: Figures, at: Tensor) -> Tensor:
    inside = torch.from_numpy(np.interp(at.numpy(), known, values))
    return inside * (at / known[-1]).clamp(min=1.0)


def read_measured(
    cost: CostConfig, model: str, seq_len: int, devices: tuple[str, ...]
) -> MeasuredTimes:
    """Read the measurements of a model on some devices.

    Args:
        cost: Names the source, and says how it spells its names.
        model: Name of the model, as `matching_name` finds it.
        seq_len: Of the job; a source that states another one is refused.

    Errors:
        ConfigError: no path, a broken file, or a model or GPU that was not measured.
    """
    path = cost.profile
    if path is None:
        raise ConfigError(
            "cost.profile=null must name a folder or a CSV file of measured layer times; try "
            "cost=analytic, which needs none."
        )
    found = _sized_profile(Path(path), seq_len) or _from_chains(read_profiles(path))
    chosen = matching_name(
        "cost.profile_model", cost.profile_model or model, {m for m, _ in found}, path
    )
    gpus = {g for m, g in found if m == chosen}
    own = {d: matching_name("cost.profile_gpu", cost.profile_gpu or d, gpus, path) for d in devices}
    said = cost.profile_collectives or _said_of_collectives(Path(path))
    by_device = {device: _completed(found[chosen, gpu], said, path) for device, gpu in own.items()}
    return MeasuredTimes(path, by_device)


def _said_of_collectives(path: Path) -> str | None:
    """Return what the column `collectives` of a source says; None without the column."""
    file = path / FORWARD_FILE if path.is_dir() else path
    rows = read_rows(file, ())
    said = sorted({row.get("collectives", "") for _, row in rows} - {""})
    if not set(said) <= set(COLLECTIVES) or len(said) > 1:
        values = " or ".join(COLLECTIVES)
        raise ConfigError(
            f"{file}: collectives={said[0]} must be {values}, in all rows; try {values}."
        )
    return said[0] if said else None


def _completed(entries: KindTimes, collectives: str | None, path: str) -> KindTimes:
    """Return times whose collectives of tensor parallelism count once."""
    split = [tp for _, tp in entries if tp > 1]
    if split and collectives is None:
        raise ConfigError(
            f"cost.profile_collectives=null must say whether the times of {path} at tp={max(split)} "
            "include the collectives of tensor parallelism (Metis, Sailor, AMP and FASOP include "
            "them); try cost.profile_collectives=included."
        )
    if collectives == "excluded":
        return entries
    result = dict(entries)
    for (kind, tp), measured in entries.items():
        none = (0.0,) * len(measured.sizes)
        result[kind, tp] = replace(measured, tp_forward=none, tp_backward=none)
    return result


def _from_chains(profiles: Profiles) -> TimesBySource:
    """Return the median layer of every kind by model and GPU, at the sizes with a multiplier."""
    found: TimesBySource = {}
    for (model, gpu, tp), chain in profiles.layers.items():
        entries = found.setdefault((model, gpu), {})
        for name in sorted(set(chain.kinds)):
            pairs = zip(chain.kinds, chain.forward_s, strict=True)
            one = median(seconds for kind, seconds in pairs if kind == name)
            rows = profiles.multipliers.get((model, gpu, name), ())
            sizes = [size for size, _ in rows] or [1]
            forward = tuple(one * profiles.multiplier(model, gpu, name, size) for size in sizes)
            backward = tuple(BACKWARD_FACTOR * seconds for seconds in forward)
            entries[KINDS.get(name, name), tp] = Measured(
                tuple(map(float, sizes)), forward, backward
            )
    return found


def _sized_profile(path: Path, seq_len: int) -> TimesBySource:
    """Read a file with a `micro_batch` column by model and GPU; empty for any other source."""
    if not path.is_file() or "micro_batch" not in path.read_text("utf-8", "replace").split("\n")[0]:
        return {}
    points: dict[tuple[str, str], dict[tuple[str, int], dict[int, list[list[float]]]]] = {}
    for place, row in read_rows(path, SIZED_COLUMNS, ("saved_bytes",)):
        if row["seq_len"] != seq_len:
            raise ConfigError(
                f"{place}: seq_len={row['seq_len']} must be training.seq_len={seq_len}; try "
                f"training.seq_len={row['seq_len']}."
            )
        kind = str(row["layer_kind"])
        kind = KINDS.get(kind, kind)
        kinds = points.setdefault((row["model"], row["gpu"]), {})
        sizes = kinds.setdefault((kind, row["tp"]), {})
        figures = [row[key] for key in SIZED_FIGURES if key in row]
        sizes.setdefault(row["micro_batch"], []).append(figures)
    return {
        source: {key: _medians(sizes) for key, sizes in kinds.items()}
        for source, kinds in points.items()
    }


def _medians(points: dict[int, list[list[float]]]) -> Measured:
    """Return the median figures of every size."""
    order = sorted(points)
    rows = [map(median, zip(*points[size], strict=True)) for size in order]
    return Measured(tuple(map(float, order)), *zip(*rows, strict=True))
