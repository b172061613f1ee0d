"""Measured layer times in the place of the analytic ones (`cost=profiled`).

A source is one of `layer_profiles.py`, or a file that also holds `micro_batch` and what was measured at it
(`backward_s`, `saved_bytes`). Where a source has no backward times, backward is taken as twice forward.
Layers of kinds that were not measured keep the analytic formulas, and so does all communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from darts_parallel.errors import ConfigError
from darts_parallel.problem.layer_profiles import Profiles, matching_name, read_profiles, read_rows

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

    def figures(self, device: str, kind: str, tp: Tensor, sizes: Tensor, name: str) -> Tensor | None:
        """Return a field of `Measured` of one micro-batch, `(O, C)`, or None where it was not measured.

        Linear between measured sizes, proportional beyond the largest, constant below the smallest.

        Args:
            device: Name of the device.
            kind: Of the layer.
            tp: Degrees, shape `(C,)`.
            sizes: Sequences of a micro-batch, shape `(O, C)`.
            name: `forward`, `backward` or `saved`.
        """
        rows = [self.by_device[device].get((kind, int(degree))) for degree in tp.tolist()]
        known = [(row.sizes, getattr(row, name)) for row in rows if row is not None]
        if len(known) < len(rows) or any(values is None for _, values in known):
            return None
        return torch.stack([_interpolate(*row, sizes[:, c]) for c, row in enumerate(known)], 1)


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
        model: Name of the model, as `matching_name` finds it.
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
    found = _sized_profile(Path(path), seq_len) or _from_chains(read_profiles(path))
    chosen = matching_name("cost.profile_model", names[0] or model, {m for m, _ in found}, path)
    gpus = {g for m, g in found if m == chosen}
    # the only one that was measured stands for any GPU
    matched = {
        d: next(iter(gpus))
        if len(gpus) == 1
        else matching_name("cost.profile_gpu", names[1] or d, gpus, path)
        for d in devices
    }
    return MeasuredTimes(path, {device: found[chosen, gpu] for device, gpu in matched.items()})


def _from_chains(profiles: Profiles) -> dict[tuple[str, str], dict[tuple[str, int], Measured]]:
    """Return the median layer of every kind by model and GPU, at every micro-batch size with a multiplier."""
    found: dict[tuple[str, str], dict[tuple[str, int], Measured]] = {}
    for (model, gpu, tp), chain in profiles.layers.items():
        entries = found.setdefault((model, gpu), {})
        for name in sorted(set(chain.kinds) & set(KINDS)):
            one = median(s for kind, s in zip(chain.kinds, chain.forward_s, strict=True) if kind == name)
            sizes = [size for size, _ in profiles.multipliers.get((model, gpu, name), ())] or [1]
            forward = tuple(one * profiles.multiplier(model, gpu, name, size) for size in sizes)
            backward = tuple(BACKWARD_FACTOR * seconds for seconds in forward)
            entries[KINDS[name], tp] = Measured(tuple(map(float, sizes)), forward, backward)
    return found


def _sized_profile(path: Path, seq_len: int) -> dict[tuple[str, str], dict[tuple[str, int], Measured]]:
    """Read a file with a `micro_batch` column by model and GPU; empty for any other source."""
    if not path.is_file() or "micro_batch" not in path.read_text("utf-8", "replace").partition("\n")[0]:
        return {}
    points: dict[tuple[str, str, str, int], dict[int, list[tuple[float, ...]]]] = {}
    for place, row in read_rows(path, SIZED_COLUMNS, ("saved_bytes",)):
        if row["seq_len"] != seq_len:
            raise ConfigError(
                f"{place}: seq_len={row['seq_len']} must be training.seq_len={seq_len}; try "
                f"training.seq_len={row['seq_len']}."
            )
        if row["layer_kind"] in KINDS:
            entry = points.setdefault((row["model"], row["gpu"], KINDS[row["layer_kind"]], row["tp"]), {})
            figures = tuple(row[key] for key in ("forward_s", "backward_s", "saved_bytes") if key in row)
            entry.setdefault(row["micro_batch"], []).append(figures)
    found: dict[tuple[str, str], dict[tuple[str, int], Measured]] = {}
    for (model, gpu, kind, tp), sizes in points.items():
        order = sorted(sizes)
        columns = [tuple(map(median, zip(*sizes[size], strict=True))) for size in order]
        figures = tuple(zip(*columns, strict=True))
        found.setdefault((model, gpu), {})[kind, tp] = Measured(tuple(map(float, order)), *figures)
    return found
