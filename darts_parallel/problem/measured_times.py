"""Measured layer times in the place of the analytic ones (`cost=profiled`).

Three kinds of source: a folder with `layer_forward_seconds.csv` (and `micro_batch_multipliers.csv`), a
single file with those columns, or a file that also holds `micro_batch` and what was measured at it
(`backward_s`, `saved_bytes`). Where a source has no backward
times, backward is taken as twice forward. Layers of kinds that were not measured keep the analytic
formulas, and so does all communication.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from darts_parallel.errors import ConfigError
from darts_parallel.problem.layer_profiles import (
    Profiles,
    number_field,
    read_layer_profiles,
    read_profiles,
    read_rows,
    whole_field,
)

KINDS = {
    "transformer": "block", "encoder": "encoder", "decoder": "decoder", "embedding": "embedding",
    "encoder_embedding": "embedding", "embed2h": "embedding", "decoder_embedding": "decoder_embedding",
    "post_process": "head", "head": "head", "block": "block",
}  # fmt: skip
"""Kinds of layer in profiles, and ours; kinds that stand nowhere here (`noop`) are left out."""
SIZED_COLUMNS = ("model", "gpu", "tp", "layer_kind", "micro_batch", "seq_len", "forward_s", "backward_s")
BACKWARD_FACTOR = 2.0
"""Backward over forward where only forward was measured (two products for each one)."""


@dataclass(frozen=True)
class Measured:
    """One kind of layer at one tensor-parallel degree, by micro-batch size.

    `sizes` rise; `forward`, `backward` are seconds, `saved` bytes kept for backward, or None where
    they were not measured; all of equal length.
    """

    sizes: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[float, ...] | None = None


@dataclass(frozen=True)
class MeasuredTimes:
    """Measurements of one model, by device name, kind of layer and tensor-parallel degree."""

    path: str
    by_device: Mapping[str, Mapping[tuple[str, int], Measured]]

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that every device was measured at, rising."""
        sets = [{tp for _, tp in entries} for entries in self.by_device.values()]
        return tuple(sorted(set.intersection(*sets)))

    def seconds(self, device: str, kind: str, tp: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the forward and backward seconds of one micro-batch, or None where `kind` was not measured.

        Linear between measured sizes, proportional beyond the largest, constant below the smallest.

        Args:
            device: Name of the device.
            kind: Of the layer.
            tp: Degrees, shape `(C,)`.
            sizes: Sequences of a micro-batch, shape `(O, C)`.

        Returns:
            Each of shape `(O, C)`.
        """
        rows = self._rows(device, kind, tp)
        if rows is None:
            return None
        return _columns(rows, sizes, "forward"), _columns(rows, sizes, "backward")

    def saved_bytes(self, device: str, kind: str, tp: Tensor, sizes: Tensor) -> Tensor | None:
        """Return the bytes kept for backward without recomputation, as `seconds`."""
        rows = self._rows(device, kind, tp)
        if rows is None or any(row.saved is None for row in rows):
            return None
        return _columns(rows, sizes, "saved")

    def _rows(self, device: str, kind: str, tp: Tensor) -> list[Measured] | None:
        entries = self.by_device[device]
        rows = [entries.get((kind, int(degree))) for degree in tp.tolist()]
        return [row for row in rows if row is not None] if None not in rows else None


def _columns(rows: list[Measured], sizes: Tensor, name: str) -> Tensor:
    return torch.stack(
        [_interpolate(row.sizes, getattr(row, name), sizes[:, c]) for c, row in enumerate(rows)], 1
    )


def _interpolate(known: tuple[float, ...], values: tuple[float, ...], at: Tensor) -> Tensor:
    x = torch.tensor(known, dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    if len(known) == 1:
        return y[0] * (at / x[0]).clamp(min=1.0)
    upper = torch.searchsorted(x, at.contiguous()).clamp(1, len(known) - 1)
    share = ((at - x[upper - 1]) / (x[upper] - x[upper - 1])).clamp(0.0, 1.0)
    inside = y[upper - 1] + share * (y[upper] - y[upper - 1])
    return inside * (at / x[-1]).clamp(min=1.0)


def read_measured(
    path: str | None, model: str, seq_len: int, devices: tuple[str, ...], names: tuple[str | None, str | None]
) -> MeasuredTimes:
    """Read the measurements of a model on some devices.

    Args:
        path: A folder or a file.
        model: Name of the model; spelled alike but for case and punctuation.
        seq_len: Of the job; a source that states another one is refused.
        devices: Names of the cluster's devices.
        names: Model and GPU as the source spells them; None matches by name.

    Errors:
        ConfigError: no path, a broken file, or a model or GPU that was not measured.
    """
    if path is None:
        raise ConfigError(
            "cost.profile=null must name a folder or a CSV file of measured layer times; try "
            "cost=analytic, which needs none."
        )
    sized = _sized_profile(Path(path), seq_len)
    pairs = sorted(sized) if sized else sorted({(m, g) for m, g, _ in _chains(path).layers})
    chosen = _match("cost.profile_model", names[0] or model, [m for m, _ in pairs], path)
    gpus = [g for m, g in pairs if m == chosen]
    matched = {device: _match("cost.profile_gpu", names[1] or device, gpus, path) for device in devices}
    if sized:
        return MeasuredTimes(path, {device: sized[chosen, gpu] for device, gpu in matched.items()})
    profiles = _chains(path)
    return MeasuredTimes(path, {d: _from_chains(profiles, chosen, gpu) for d, gpu in matched.items()})


def _chains(path: str) -> Profiles:
    folder = Path(path)
    return read_profiles(folder) if not folder.is_file() else Profiles(path, read_layer_profiles(folder))


def _from_chains(profiles: Profiles, model: str, gpu: str) -> dict[tuple[str, int], Measured]:
    """Return the median layer of every kind, at every micro-batch size with a multiplier."""
    entries = {}
    for tp in profiles.degrees(model, gpu):
        chain = profiles.find(model, gpu, tp)
        for name in sorted(set(chain.kinds) & set(KINDS)):
            one = median(s for kind, s in zip(chain.kinds, chain.forward_s, strict=True) if kind == name)
            sizes = [size for size, _ in profiles.multipliers.get((model, gpu, name), ())] or [1]
            forward = tuple(one * profiles.multiplier(model, gpu, name, size) for size in sizes)
            backward = tuple(BACKWARD_FACTOR * seconds for seconds in forward)
            entries[KINDS[name], tp] = Measured(tuple(map(float, sizes)), forward, backward)
    return entries


def _sized_profile(path: Path, seq_len: int) -> dict[tuple[str, str], dict[tuple[str, int], Measured]]:
    """Read a file with a `micro_batch` column by model and GPU; empty for any other source."""
    if not path.is_file() or "micro_batch" not in path.read_text("utf-8", "replace").partition("\n")[0]:
        return {}
    points: dict[tuple[str, str, str, int], dict[int, list[tuple[float, ...]]]] = {}
    for line, row in read_rows(path, SIZED_COLUMNS):
        place = f"{path}, line {line}"
        if whole_field(place, "seq_len", row["seq_len"], 1) != seq_len:
            raise ConfigError(
                f"{place}: seq_len={row['seq_len']} must be training.seq_len={seq_len}; try "
                f"training.seq_len={row['seq_len']}."
            )
        if row["layer_kind"] not in KINDS:
            continue
        tp, size = (whole_field(place, key, row[key], 1) for key in ("tp", "micro_batch"))
        keys = ("forward_s", "backward_s", *(("saved_bytes",) if "saved_bytes" in row else ()))
        figures = tuple(number_field(place, key, row[key]) for key in keys)
        entry = points.setdefault((row["model"], row["gpu"], KINDS[row["layer_kind"]], tp), {})
        entry.setdefault(size, []).append(figures)
    found: dict[tuple[str, str], dict[tuple[str, int], Measured]] = {}
    for (model, gpu, kind, tp), sizes in points.items():
        order = sorted(sizes)
        columns = [tuple(map(median, zip(*sizes[size], strict=True))) for size in order]
        forward, backward, *rest = zip(*columns, strict=True)
        saved = rest[0] if rest else None
        entries = found.setdefault((model, gpu), {})
        entries[kind, tp] = Measured(tuple(map(float, order)), forward, backward, saved)
    return found


def _match(key: str, name: str, known: list[str], path: str) -> str:
    """Return the name of `known` that is `name` but for case, punctuation, a bracket and a unit of memory."""
    known = sorted(set(known))
    if name in known:
        return name
    plain = _plain(name)
    for candidate in known:
        if _plain(candidate.partition(" (")[0]) in (plain, plain + "gb"):
            return candidate
    if len(known) == 1 and key == "cost.profile_gpu":
        return known[0]
    raise ConfigError(
        f"{key}={name} must be one of {', '.join(known)}, which {path} measured; try {known[0]}."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
