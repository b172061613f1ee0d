"""Posterior of the calibrated figures of the hardware, whose means are the presets.

The logarithm of a predicted figure is normal. Its variance has three parts: the fitted parameters
(Laplace posterior of `conf/calibrated.yaml` and `.npz`, widened as held-out runs ask for), the
prior of every device, framework or link without runs, and what no parameter explains (`spread` in
the file, wider on GPUs whose own runs the fit misses).
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.config import RunConfig, config_dir, module_data, read_yaml
from darts_parallel.cost import float_tensor
from darts_parallel.errors import ConfigError
from darts_parallel.problem import CONTEXT_GIB, GIB, Cluster, Problem

CORRELATION_STEPS = 127
"""Steps of a correlation of 1 in the file: one signed byte."""
NORMAL = 1.2815515655446004
"""Standard deviations of half of an 80 % interval."""
REPEAT = 0.015
"""Standard deviation of the logarithm of a repeated measurement (releases differ by 1.0 % in the median)."""
LEAST_MEMORY_SPREAD = 1e-3
"""Standard deviation of the logarithm of bytes at least: keeps probabilities continuous."""
EXPERTS = "experts"
"""Key of the spreads of MoE models, within the spreads of a figure."""
DENSE = "dense"
"""Key of what the fit leaves on GPUs, of all other models."""
BASE = "base"
METRIC = "device"
"""Reported memory metric: total device usage."""
STATE = "state_factor"
FACTORS = (STATE, "activation_factor")
"""Figures of a device that multiply its bytes."""
RESERVED = "reserved_GiB"
"""Quantity of the bytes outside of the allocator."""
NAMES = module_data(__file__)
FAMILIES: dict[str, str] = NAMES["families"]
"""Devices whose calibrated figures are one."""
KINDS: dict[str, dict[float, str]] = NAMES["links"]
"""Calibrated link by the data sheet's 10^9 bytes/s."""


class LatentPlace(NamedTuple):
    """Where a calibrated quantity applies; empty where it does not depend on that."""

    quantity: str
    device: str = ""
    framework: str = ""
    intra: str = ""
    """Link inside a node."""
    inter: str = ""
    """Link between nodes."""

    def name(self, scope: str) -> str:
        """Return the name of the place within a scope, such as `device+framework`."""
        parts = self._asdict() | {BASE: "", "memory_metric": METRIC}
        return "+".join(parts[word] for word in scope.split("+"))


Slopes = Mapping[LatentPlace, float]
"""d logarithm / d latent parameter: elasticities in the transformed (unconstrained) quantities."""
LatentKey = tuple[str, str, str]
"""Quantity, scope and name of a latent number of the calibration; the name is empty in `BASE`."""


class ResidualSpreads(NamedTuple):
    """Standard deviations of the logarithm that no parameter explains, for one kind of model."""

    seconds: float
    """Standard deviation for the seconds of a plan."""
    shared: float
    """The part of `seconds` that all plans of a job have in common."""
    own: float
    """The part of `seconds` that is a plan's own."""
    memory: float
    """Standard deviation for the bytes of a device."""

    @staticmethod
    def read(spread: Mapping[str, Any], *, experts: bool) -> "ResidualSpreads":
        """Read `spread` of the calibration; releases of MoE models differ more."""
        seconds, memory = (
            spread[part][EXPERTS] if experts else spread[part] for part in ("seconds", "memory")
        )
        whole = float(seconds["own"])
        pair = float(seconds.get("pair", whole))
        own = min(pair / sqrt(2.0), whole)
        shared = sqrt(max(whole**2 - own**2, 0.0))
        of_memory = max(float(memory["own"]), LEAST_MEMORY_SPREAD)
        return ResidualSpreads(whole, shared, own, of_memory)

    @property
    def measured_seconds(self) -> float:
        """Standard deviation of the logarithm of measured seconds, repetitions included."""
        return sqrt(self.seconds**2 + REPEAT**2)


class Moved(NamedTuple):
    """N logarithms after the runs of a user."""

    means: Tensor
    """How far they move, `(N,)`."""
    covariance: Tensor
    """Shape `(N, N)`."""


@dataclass(frozen=True)
class Posterior:
    """The posterior of `conf/calibrated.yaml` for one kind of model."""

    quantities: Mapping[str, Any]
    keys: Mapping[LatentKey, int]
    """Row of a latent number in `covariance`."""
    covariance: Tensor
    """Shape `(P, P)`."""
    residuals: ResidualSpreads
    misfits: Mapping[str, float]
    """Standard deviations of the log seconds that the fit left on GPUs that it misses, by device."""
    runs: Sequence[RunConfig] = ()
    """Runs of the user, on which all methods condition."""

    @property
    def difference(self) -> float:
        """Log ratio of seconds of two plans below which they are not told apart (80 %)."""
        return NORMAL * sqrt(2.0) * self.residuals.own

    def seconds_spread(self, cluster: Cluster) -> float:
        """Return the standard deviation of the log seconds that no parameter explains.

        GPUs that the fit misses have a wider one, until the user has measured a run.
        """
        own = (self.misfits.get(family(group.device.name), 0.0) for group in cluster.groups)
        return max(self.residuals.seconds, *own)

    def variance(self, slopes: Slopes) -> float:
        """Return the variance of a logarithm with these derivatives."""
        return float(self.covariances([slopes])[0, 0])

    def covariances(self, rows: Sequence[Slopes]) -> Tensor:
        """Return the covariance of N logarithms, `(N, N)`.

        A place without runs deviates by itself, as widely as its prior.
        """
        return self.given_runs(rows).covariance

    def given_runs(self, rows: Sequence[Slopes], residual: Tensor | None = None) -> Moved:
        """Condition N logarithms on R runs: the one likelihood of all that users measure.

        A run's error is its slopes times the errors of the parameters, plus a residual.

        Args:
            residual: Covariance of residuals, of the N logarithms and then of the runs, `(N + R, N
                + R)`. None: the logarithms have none, and those of the runs are independent
                    (`RunConfig.sd`).
        """
        count = len(rows)
        seen = [slopes_of(run) for run in self.runs]
        if residual is None:
            sds = [0.0] * count + [run.sd for run in self.runs]
            residual = float_tensor(sds).square().diag()
        errors = float_tensor([run.error for run in self.runs])
        whole = self._prior_covariance([*rows, *seen]) + residual
        prior = whole[:count, :count]
        shared = whole[count:, :count]
        gain = torch.linalg.solve(whole[count:, count:], shared).T
        return Moved(gain @ errors, prior - gain @ shared)

    def _prior_covariance(self, rows: Sequence[Slopes]) -> Tensor:
        """Return the covariance of logarithms before the user's runs, `(N, N)`."""
        columns: dict[LatentKey, list[float]] = {}
        for row, slopes in enumerate(rows):
            for place, slope in slopes.items():
                for key in self._latent_keys(place):
                    columns.setdefault(key, [0.0] * len(rows))[row] += slope
        known = [key for key in columns if key in self.keys]
        index = torch.tensor([self.keys[key] for key in known], dtype=torch.long)
        known_columns = [columns.pop(key) for key in known]
        sides = float_tensor(known_columns).reshape(-1, len(rows))
        result = sides.T @ self.covariance[index][:, index] @ sides
        for (quantity, scope, _), column in columns.items():
            sd = float(self.quantities[quantity]["prior_sd"][scope])
            side = sd * float_tensor(column)
            result = result + torch.outer(side, side)
        return result

    def _latent_keys(self, place: LatentPlace) -> list[LatentKey]:
        """Return the latent numbers whose sum is the quantity at a place."""
        scopes = self.quantities[place.quantity]["prior_sd"]
        return [(place.quantity, scope, place.name(scope)) for scope in scopes]

    def memory_spread(self, cluster: Cluster, framework: str) -> Callable[[float], float]:
        """Return the largest standard deviation of the log bytes of any device, by how full it is.

        Variances are convex in the shares of state and activations: one of both alone is the worst.

        Returns:
            The spread for a share of the device's memory that is full.
        """
        known: list[tuple[float, Tensor]] = []
        for device in {group.device for group in cluster.groups}:
            kept = max(float(device.reserved) - CONTEXT_GIB * GIB, 0.0) / device.memory
            where = (family(device.name), framework)
            for factor in FACTORS:
                rows = [{LatentPlace(name, *where): 1.0} for name in (RESERVED, factor)]
                known.append((kept, self.covariances(rows)))

        def spread(room: float) -> float:
            worst = 0.0
            for kept, covariance in known:
                share = min(kept / room, 1.0)
                shares = float_tensor([share, 1.0 - share])
                worst = max(worst, float(shares @ covariance @ shares))
            return sqrt(worst + self.residuals.memory**2)

        return spread

    def per_unit(self, quantity: str, value: float) -> float:
        """Return d log(value) / d latent parameter of a quantity."""
        scale = self.quantities[quantity]["scale"]
        if scale == "share":
            return max(1.0 - value, 0.0)
        return max(value - float(scale["above"]), 0.0) / value

    def moved_value(self, quantity: str, value: float, distance: float) -> float:
        """Return a value moved on its unbounded scale; at the end of its range it stays there."""
        scale = self.quantities[quantity]["scale"]
        if scale != "share":
            above = float(scale["above"])
            return above + (value - above) * exp(distance)
        if not 0.0 < value < 1.0:
            return value
        return 1.0 / (1.0 + (1.0 / value - 1.0) * exp(-distance))


def slopes_of(run: RunConfig) -> Slopes:
    """Read the slopes of a run by place."""
    return {LatentPlace(*key.split("|")): slope for key, slope in run.slopes.items()}


def family(device: str) -> str:
    """Return the device of the calibration that stands for a device."""
    return FAMILIES.get(device, device)


def link_place(
    quantity: str,
    framework: str,
    side: str,
    rate: float,
) -> LatentPlace:
    """Return the place of a link's quantity, by the data sheet's 10^9 bytes/s."""
    kind = KINDS[side].get(rate, "")
    return LatentPlace(quantity, "", framework, **{side: kind})


def posterior(problem: Problem) -> Posterior:
    """Return the shipped posterior given the runs of the cluster.

    Errors:
        ConfigError: a run has a slope in something else than a calibrated quantity.
    """
    known = _shipped()[problem.model.has_experts]
    runs = problem.config.cluster.runs
    for run in runs:
        for key in run.slopes:
            parts = key.split("|")
            if parts[0] not in known.quantities or len(parts) != len(LatentPlace._fields):
                raise ConfigError(
                    "cluster.runs has slopes of no figure; try a file that tune --from-log wrote."
                )
    return replace(known, runs=runs, misfits={}) if runs else known


def uncalibrated(problem: Problem) -> list[str]:
    """Name the devices and the framework of a job of which the calibration has no run."""
    known = posterior(problem)
    if known.runs:
        return []
    fitted = known.quantities["gemm_efficiency"]
    devices = dict.fromkeys(group.device.name for group in problem.cluster.groups)
    missing = [name for name in devices if family(name) not in fitted["device"]]
    framework = problem.software.name
    if framework and framework not in fitted["framework"]:
        missing.append(framework)
    return missing


def latent_numbers(quantities: Mapping[str, Any]) -> dict[LatentKey, tuple[float, float]]:
    """Return mean and standard deviation of all latent numbers in a file of the calibration."""
    found: dict[LatentKey, tuple[float, float]] = {}
    for quantity, own in quantities.items():
        for scope in own.get("prior_sd", ()):
            pairs = {"": own[BASE]} if scope == BASE else own.get(scope, {})
            found |= {(quantity, scope, name): pair for name, pair in pairs.items()}
    return found


@lru_cache(maxsize=1)
def _shipped() -> dict[bool, Posterior]:
    """Read the posterior of the calibration: for models without experts, and with them."""
    path = config_dir() / "calibrated.yaml"
    data = read_yaml(path)
    numbers = latent_numbers(data["quantities"])
    keys = {key: row for row, key in enumerate(numbers)}
    scale = float_tensor([sd for _, sd in numbers.values()])
    correlation = read_correlation(path.with_suffix(".npz"), len(keys))
    covariance = correlation * torch.outer(scale, scale)
    kinds = {}
    for experts in (False, True):
        residuals = ResidualSpreads.read(data["spread"], experts=experts)
        misfits = data["spread"]["misfits"][EXPERTS if experts else DENSE]
        kinds[experts] = Posterior(data["quantities"], keys, covariance, residuals, misfits)
    return kinds


def correlation_bytes(correlation: Tensor) -> bytes:
    """Write a correlation matrix `(P, P)` as an `.npz` file: its lower triangle in steps of 1/127."""
    lower = correlation.numpy()[np.tril_indices(len(correlation), -1)]
    steps = np.rint(lower * CORRELATION_STEPS)
    file = io.BytesIO()
    np.savez_compressed(file, lower=steps.astype(np.int8))
    return file.getvalue()


def read_correlation(path: Path, size: int) -> Tensor:
    """Read the matrix that `correlation_bytes` wrote, `(size, size)`."""
    lower = np.zeros((size, size))
    with np.load(path) as stored:
        lower[np.tril_indices(size, -1)] = stored["lower"] / CORRELATION_STEPS
    return torch.from_numpy(lower + lower.T + np.eye(size))
