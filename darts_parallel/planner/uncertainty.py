"""How sure an answer is: intervals of seconds and memory, and which plans cannot be told apart.

The logarithm of a predicted figure is taken as normal. Its variance is that of the fitted parameters
(Laplace posterior of `conf/calibrated.yaml` and `.npz`, widened as held-out runs ask for, through the
elasticities of the plan; a device, framework or link without runs adds the prior's variance of its own
deviation) plus that of what no parameter holds (`spread` in the file). Intervals hold 80 % of the runs of
sources and families that were left out (`experiments/results/validation.md` tells how many they hold).
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from torch import Tensor

from darts_parallel.config import ClusterConfig, RunConfig, config_dir
from darts_parallel.cost import CostBreakdown, evaluate, hard_plan
from darts_parallel.errors import ConfigError
from darts_parallel.planner.elasticities import time_elasticities
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

STEPS = 127
"""Steps of a correlation of 1 in the file."""
NORMAL = 1.2815515655446004
"""Standard deviations of half of an 80 % interval."""
DIRECTIONS, DRAWS = 6, 1024
"""Directions of the error of a job's memory that are integrated over, and points of the integral."""
GAUSS_NEWTON = 3
"""Steps by which a run moves figures."""
LARGEST_ERROR = log(10.0)
"""Largest |log(measured / predicted)| of a run that is taken for one of its plan."""
EXPERTS = "experts"
"""Spreads of mixtures, within those of a figure."""
BASE = "base"
METRIC = "device"
"""Memory metric that answers speak of: total device usage."""
PLACE = ("device", "framework", "intra", "inter", "memory_metric")
"""Parts of a place that scopes name."""
FIGURES = {
    "layer_overhead_us": "layer_overhead",
    "expert_overhead_us": "expert_overhead",
    "reserved_GiB": "reserved",
}
"""Fields of a `Device` by quantity, where they differ."""
LINKS = {
    "intra_efficiency": ("intra", "bandwidth"),
    "inter_efficiency": ("inter", "bandwidth"),
    "intra_latency_us": ("intra", "latency"),
    "inter_latency_us": ("inter", "latency"),
}
FAMILIES = {
    "a100_40": "a100",
    "a100_80": "a100",
    "v100_16": "v100",
    "h200": "h100",
    "mi325x": "mi300x",
    "mi355x": "mi350x",
}
"""Devices whose fitted figures are one."""
KINDS = {
    "intra": {150.0: "nvlink2", 300.0: "nvlink3", 450.0: "nvlink4", 900.0: "nvlink5"},
    "inter": {200.0: "infiniband", 400.0: "infiniband"},
}
"""Fitted link by the data sheet's 10^9 bytes/s."""


@dataclass(frozen=True)
class Intervals:
    """80 % intervals of one plan's figures."""

    iteration_time_s: tuple[float, float]
    half_width: float
    """Half width of the logarithm of the seconds: 0.09 reads as ± 9 %."""
    memory_bytes: tuple[tuple[float, float], ...]
    """Bytes of a device of every stage."""
    out_of_memory: tuple[float, ...]
    """Probability that a device of the stage needs more than it has."""
    any_out_of_memory: float
    """Probability that some device does: the job as a whole runs out."""
    difference: float
    """Half width of the logarithm of the ratio of two plans of this job: a smaller difference is none."""

    def label(self) -> str:
        """Return the half width for reports, e.g. `± 9 %`."""
        return f"± {100 * (exp(self.half_width) - 1):.0f} %"

    def indistinguishable(self, seconds: float, others: float) -> bool:
        """Return whether two plans of the job differ by less than the model can tell."""
        return abs(log(others / seconds)) < self.difference


Place = tuple[str, str, str, str, str]
"""Quantity, device, framework, and links inside and between nodes."""
Slopes = Mapping[Place, float]
"""Derivative of a logarithm in each quantity on that quantity's unbounded scale, by place."""


@dataclass(frozen=True)
class Posterior:
    """The posterior of `conf/calibrated.yaml`."""

    quantities: Mapping[str, Any]
    keys: Mapping[tuple[str, str, str], int]
    """Place of a latent number by quantity, scope and name."""
    covariance: Tensor
    """Shape `(P, P)`."""
    spread: Mapping[str, Any]
    runs: Sequence[RunConfig] = ()
    """Those of the user: all below is given them."""

    def variance(self, slopes: Slopes) -> float:
        """Return variance of a logarithm with these derivatives."""
        return float(self.covariances([slopes])[0, 0])

    def covariances(self, rows: Sequence[Slopes]) -> Tensor:
        """Return the covariance of N logarithms, `(N, N)`.

        What has no runs is a deviation of its own, as wide as its prior.
        """
        return self.given_runs(rows)[1]

    def given_runs(self, rows: Sequence[Slopes]) -> tuple[Tensor, Tensor]:
        """Return how far the user's runs move N logarithms, `(N,)`, and their covariance after that."""
        seen = [
            {cast(Place, tuple(key.split("|"))): d for key, d in run.slopes.items()}
            for run in self.runs
        ]
        whole, n = self._without_runs([*rows, *seen]), len(rows)
        pairs = torch.tensor([[run.sd**2, run.error] for run in self.runs], dtype=torch.float64)
        noise, errors = pairs.reshape(-1, 2).T
        gain = torch.linalg.solve(whole[n:, n:] + torch.diag(noise), whole[n:, :n]).T
        return gain @ errors, whole[:n, :n] - gain @ whole[n:, :n]

    def _without_runs(self, rows: Sequence[Slopes]) -> Tensor:
        known = torch.zeros(len(rows), len(self.keys), dtype=torch.float64)
        others: dict[tuple[str, str, str], Tensor] = {}
        for row, slopes in enumerate(rows):
            for (quantity, *where), slope in slopes.items():
                place = dict(zip(PLACE, (*where, METRIC), strict=True))
                for scope in self.quantities[quantity]["prior_sd"]:
                    name = (
                        "" if scope == BASE else "+".join(place[part] for part in scope.split("+"))
                    )
                    key = (quantity, "" if scope == BASE else scope, name)
                    if key in self.keys:
                        known[row, self.keys[key]] += slope
                    else:
                        column = others.setdefault(key, torch.zeros(len(rows), dtype=torch.float64))
                        column[row] += slope
        result = known @ self.covariance @ known.T
        for (quantity, scope, _), column in others.items():
            sd = float(self.quantities[quantity]["prior_sd"][scope or BASE])
            result = result + sd**2 * torch.outer(column, column)
        return result

    def largest_residual(self, part: str, problem: Problem) -> float:
        """Return the standard deviation of what no parameter explains; releases of mixtures differ more."""
        spreads = self.spread[part]
        return float((spreads[EXPERTS] if problem.model.has_experts else spreads)["own"])

    def memory_spread(self, problem: Problem) -> float:
        """Return the standard deviation of the error of bytes that no parameter explains, above 0."""
        return max(self.largest_residual("memory", problem), 1e-3)

    def largest_memory_spread(self, problem: Problem, room: float = 1.0) -> float:
        """Return the largest standard deviation of the logarithm of a device's bytes, whatever they are.

        Variances are convex in the shares of state and activations: one of both alone is the worst.

        Args:
            room: Share of the device's memory that is full.
        """
        worst, name = 0.0, problem.software.name
        for device in {group.device for group in problem.cluster.groups}:
            kept, place = (
                min(float(device.reserved / device.memory) / room, 1.0),
                _family(device.name),
            )
            for factor in ("state_factor", "activation_factor"):
                shares = {factor: 1.0 - kept, "reserved_GiB": kept}
                own = {(quantity, place, name, "", ""): share for quantity, share in shares.items()}
                worst = max(worst, self.variance(own))
        return sqrt(worst + self.memory_spread(problem) ** 2)

    def difference(self, problem: Problem) -> float:
        """Return the logarithm of the ratio of seconds below which two plans are not told apart (80 %)."""
        return NORMAL * sqrt(2.0) * self.job_spread(problem)[1]

    def job_spread(self, problem: Problem) -> tuple[float, float]:
        """Return the standard deviations of what all plans of a job share, and of what is each plan's own."""
        whole, spreads = self.largest_residual("seconds", problem), self.spread["seconds"]
        pair = (spreads[EXPERTS] if problem.model.has_experts else spreads).get("pair", whole)
        own = min(float(pair) / sqrt(2.0), whole)
        return sqrt(max(whole**2 - own**2, 0.0)), own


def posterior(problem: Problem) -> Posterior | None:
    """Return the shipped posterior given the runs of the cluster; None where the file holds none.

    Errors:
        ConfigError: a run has a slope in something else than a figure.
    """
    known, runs = _shipped(), problem.config.cluster.runs
    if known is None or not runs:
        return known
    if any(
        key.count("|") != 4 or key.split("|")[0] not in known.quantities
        for r in runs
        for key in r.slopes
    ):
        raise ConfigError(
            "cluster.runs has slopes of no figure; try a file that tune --from-log wrote."
        )
    return replace(known, runs=runs)


@lru_cache(maxsize=1)
def _shipped() -> Posterior | None:
    """Return the posterior of the calibration; None where the file holds none."""
    path = Path(config_dir()) / "calibrated.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    data: Any = yaml.load(path.read_text(encoding="utf-8"), loader)  # type: ignore[no-untyped-call]
    keys: dict[tuple[str, str, str], int] = {}
    sds: list[float] = []
    for quantity, own in data["quantities"].items():
        for scope in own["prior_sd"]:
            pairs = {"": own[BASE]} if scope == BASE else own.get(scope, {})
            for name, (_, sd) in pairs.items():
                keys[quantity, "" if scope == BASE else scope, name] = len(sds)
                sds.append(sd)
    if not data.get("spread"):
        return None
    scale = torch.tensor(sds, dtype=torch.float64)
    covariance = read_correlation(path.with_suffix(".npz"), len(sds)) * torch.outer(scale, scale)
    return Posterior(data["quantities"], keys, covariance, data["spread"])


def intervals(
    plan: Plan, problem: Problem, cost: CostBreakdown, elasticities: Mapping[str, float]
) -> Intervals | None:
    """Return 80 % intervals of a plan's seconds and bytes.

    Args:
        elasticities: Of its seconds in every figure of the hardware (`sensitivity`).

    Returns:
        None without elasticities (`cost=searcher`), and where no run has calibrated the model.
    """
    known = posterior(problem)
    if known is None or not elasticities:
        return None
    time = known.variance(time_slopes(known, problem, elasticities))
    half = NORMAL * sqrt(time + known.largest_residual("seconds", problem) ** 2)
    used = torch.tensor(cost.memory_bytes, dtype=torch.float64)
    covariance, spread = (
        known.covariances(_memory_slopes(plan, problem)),
        known.memory_spread(problem),
    )
    room = torch.tensor(cost.capacity_bytes, dtype=torch.float64).div(used).log()
    sd = (covariance.diagonal() + spread**2).sqrt()
    ends = zip(
        (used * (-NORMAL * sd).exp()).tolist(), (used * (NORMAL * sd).exp()).tolist(), strict=True
    )
    return Intervals(
        (cost.iteration_time_s * exp(-half), cost.iteration_time_s * exp(half)),
        half,
        tuple(ends),
        tuple(torch.special.ndtr(-room / sd).tolist()),
        any_above(room, covariance, spread),
        known.difference(problem),
    )


def out_of_memory(
    plan: Plan, problem: Problem, measured: Sequence[tuple[Plan, float]] = ()
) -> float | None:
    """Return the probability that a job runs out of memory; None where no run has calibrated the model.

    Args:
        measured: Plans and the peak bytes of their fullest device; they move what plans have in common.
    """
    known = posterior(problem)
    if known is None or not problem.config.cost.knows_stages:
        return None
    cost, spread, runs = evaluate(plan, problem), known.memory_spread(problem), []
    runs += [
        replace(run, error=0.0) for run in known.runs
    ]  # by which the figures have moved already
    for other, peak in measured:
        used = evaluate(other, problem).memory_bytes
        slopes = _memory_slopes(other, problem)[used.index(max(used))]
        runs.append(_run("", log(peak / max(used)), spread, slopes))
    means, covariance = replace(known, runs=runs).given_runs(_memory_slopes(plan, problem))
    pairs = zip(cost.capacity_bytes, cost.memory_bytes, strict=True)
    room = torch.tensor([log(capacity / used) for capacity, used in pairs], dtype=torch.float64)
    return any_above(room - means, covariance, spread)


def _run(name: str, error: float, sd: float, slopes: Slopes) -> RunConfig:
    return RunConfig(
        name, error, sd, {"|".join(place): slope for place, slope in slopes.items() if slope}
    )


def any_above(room: Tensor, covariance: Tensor, spread: float) -> float:
    """Return the probability that some of K jointly normal errors exceeds its room.

    Args:
        room: Logarithm of capacity over predicted bytes, `(K,)`.
        covariance: Of the errors, as far as the stages' fitted figures make them, `(K, K)`.
        spread: Standard deviation of the error that all stages share; integrated in closed form, the
            covariance along its `DIRECTIONS` widest directions by a fixed Sobol sequence.
    """
    values, vectors = torch.linalg.eigh(covariance)
    count = min(DIRECTIONS, len(room))
    root = vectors[:, -count:] * values[-count:].clamp(min=0.0).sqrt()
    sobol = torch.quasirandom.SobolEngine(count)  # type: ignore[no-untyped-call]
    uniform = sobol.draw(DRAWS, dtype=torch.float64) + 0.5 / DRAWS
    least = (room - torch.special.ndtri(uniform) @ root.T).amin(1)
    return float(torch.special.ndtr(-least / spread).mean())


def _family(device: str) -> str:
    return FAMILIES.get(device, device)


def time_slopes(known: Posterior, problem: Problem, elasticities: Mapping[str, float]) -> Slopes:
    """Return d log(seconds) / d latent parameter of every quantity.

    Args:
        elasticities: Of the plan's seconds in every figure of the hardware.
    """
    framework = problem.software.name
    cluster, narrow = problem.cluster, f"{problem.training.precision}_efficiency"
    slopes: dict[Place, float] = {}
    for name, elasticity in elasticities.items():
        owner, _, field = name.rpartition(".")
        if not elasticity or not field:
            continue
        if owner.startswith("devices."):
            own = owner.removeprefix("devices.")
            device = next(group.device for group in cluster.groups if group.device.name == own)
            named = {figure: quantity for quantity, figure in FIGURES.items()}.get(field, field)
            quantity = narrow if field == "fp8_efficiency" else named
            value = float(getattr(device, field)) * (1e6 if quantity.endswith("_us") else 1.0)
            place = (_family(device.name), framework, "", "")
        else:
            side = "inter" if owner.endswith("inter_node") else "intra"
            quantity = next((q for q, where in LINKS.items() if where == (side, field)), "")
            rate, efficiency = _link(problem, owner, side)
            value = 1.0 if field == "latency" else efficiency
            place = _link_place(framework, side, rate)
        if quantity in known.quantities:
            key = (quantity, *place)
            slopes[key] = slopes.get(key, 0.0) + elasticity * _per_unit(
                known.quantities[quantity], value
            )
    return slopes


def _link_place(framework: str, side: str, rate: float) -> tuple[str, str, str, str]:
    """Return device, framework and links of a link's figures, by the data sheet's 10^9 bytes/s."""
    kind = KINDS[side].get(rate, "")
    return "", framework, kind if side == "intra" else "", kind if side == "inter" else ""


def _per_unit(quantity: Mapping[str, Any], value: float) -> float:
    """Return d log(value) / d latent parameter."""
    if quantity["scale"] == "share":
        return max(1.0 - value, 0.0)
    above = float(quantity["scale"]["above"])
    return max(value - above, 0.0) / value


def _link(problem: Problem, owner: str, side: str) -> tuple[float, float]:
    """Return the data sheet's 10^9 bytes/s and efficiency of a link named as `sensitivity` names it."""
    config = problem.config.cluster
    index = int(owner.split(".")[1]) if owner.startswith("nodes.") else 0
    group = config.nodes[min(index, len(config.nodes) - 1)]
    own = group.inter_node if owner.startswith("nodes.") else None
    link = group.intra_node if side == "intra" else own or config.inter_node
    return float(link.bandwidth_GBps), float(link.efficiency)


def _memory_slopes(plan: Plan, problem: Problem) -> Sequence[Slopes]:
    """Return d log(bytes) / d latent parameter of every stage; bytes are linear in each of the factors."""
    usual, framework = hard_plan(plan, problem)[2].memory[0], problem.software.name
    cluster = problem.cluster.arranged(plan.node_order)
    stages = [cluster.stage_group(k, plan.pp).device for k in range(plan.pp)]
    total = usual + torch.tensor([device.reserved for device in stages], dtype=torch.float64)
    result: list[dict[Place, float]] = [{} for _ in stages]
    for factor in ("state_factor", "activation_factor"):
        part = (hard_plan(plan, _with_doubled(problem, factor))[2].memory[0] - usual) / total
        for slopes, share, device in zip(result, part.tolist(), stages, strict=True):
            slopes[factor, _family(device.name), framework, "", ""] = share
    for slopes, device, bytes_ in zip(result, stages, total.tolist(), strict=True):
        place = _family(device.name)
        slopes["reserved_GiB", place, framework, "", ""] = float(device.reserved) / bytes_
    return result


def _with_doubled(problem: Problem, factor: str) -> Problem:
    """Return the problem with twice a factor of its devices; remembered: the report asks three times."""
    known: dict[str, Problem] = problem.priced
    if factor not in known:
        known[factor] = problem.with_devices(
            lambda device: replace(device, **{factor: 2.0 * float(getattr(device, factor))})  # type: ignore[arg-type]
        )
    return known[factor]


def correlation_bytes(correlation: Tensor) -> bytes:
    """Write a correlation matrix `(P, P)` as an `.npz` file: its lower triangle in steps of 1/127."""
    steps = np.rint(correlation.numpy()[np.tril_indices(len(correlation), -1)] * STEPS).astype(
        np.int8
    )
    file = io.BytesIO()
    np.savez_compressed(file, lower=steps)
    return file.getvalue()


def read_correlation(path: Path, size: int) -> Tensor:
    """Read the matrix that `correlation_bytes` wrote, `(size, size)`."""
    lower = np.zeros((size, size))
    with np.load(path) as stored:
        lower[np.tril_indices(size, -1)] = stored["lower"] / STEPS
    return torch.from_numpy(lower + lower.T + np.eye(size))


def sureness(plan: Plan, problem: Problem) -> str:
    """Return the half width of a plan's seconds for reports."""
    found = intervals(plan, problem, evaluate(plan, problem), time_elasticities(plan, problem))
    return "unknown" if found is None else found.label()


def own_cluster(problem: Problem) -> ClusterConfig:
    """Return the cluster with the figures of its framework and a name of both, for runs to be added."""
    cluster, software = problem.config.cluster, problem.software
    if cluster.runs:
        return cluster
    devices = {name: software.on(name, device) for name, device in cluster.devices.items()}
    name = f"{cluster.name}_{software.name or 'common'}"
    return replace(cluster, name=name, devices=devices, runs_of=software.name or None)


def with_run(
    problem: Problem, plan: Plan, log_file: str, seconds: float, peak: float | None
) -> Problem:
    """Return the problem with figures at the means given a run of a plan and the earlier ones of its cluster.

    Args:
        peak: Bytes of the fullest device, of which what is reserved outside the allocator is assumed.

    Errors:
        ConfigError: the run is none of this job, or was read before; no calibration knows the cost model.
    """
    known, cluster, found, name = _shipped(), own_cluster(problem), problem, problem.software.name
    if known is None or not problem.config.cost.knows_stages:
        raise ConfigError(
            f"cost={problem.config.cost.name} has no calibrated figures; try cost=analytic."
        )
    if log_file in [run.log for run in cluster.runs]:
        raise ConfigError(f"tune.log={log_file} has been read before; try the log of another run.")
    places = [place for *_, place in _figures(known, cluster, name)]

    def means(runs: Sequence[RunConfig]) -> dict[Place, float]:
        found = replace(known, runs=runs).given_runs([{place: 1.0} for place in places])[0]
        return dict(zip(places, found.tolist(), strict=True))

    before = after = means(cluster.runs)
    for _ in range(GAUSS_NEWTON):
        cost, runs = evaluate(plan, found), list(cluster.runs)
        slopes = time_slopes(known, found, time_elasticities(plan, found))
        rows = [
            (log(seconds / cost.iteration_time_s), known.largest_residual("seconds", found), slopes)
        ]
        if peak is not None:
            used = max(cost.memory_bytes)
            full = _memory_slopes(plan, found)[cost.memory_bytes.index(used)].items()
            slopes = {place: slope for place, slope in full if place[0] != "reserved_GiB"}
            rows.append((log(peak / used), known.memory_spread(found), slopes))
        for error, sd, row in rows:
            if abs(error) > LARGEST_ERROR:
                times = f"{exp(error):.2g} times the predicted seconds or bytes"
                raise ConfigError(
                    f"tune.log={log_file} has {times}; try the log of this plan's own run."
                )
            error += sum(slope * after[place] for place, slope in row.items())
            runs.append(_run(log_file, error, sd, row))
        after, moved = means(runs), deepcopy(cluster)
        for owner, field, place in _figures(known, moved, name):
            value = _moved(known, place, getattr(owner, field), after[place] - before[place])
            setattr(owner, field, value)
        found = Problem.from_config(replace(problem.config, cluster=replace(moved, runs=runs)))
    return found


def _figures(
    known: Posterior, cluster: ClusterConfig, framework: str
) -> Iterator[tuple[Any, str, Place]]:
    """Yield all calibrated figures of a cluster: the part of it, the field, the place."""
    for name, device in cluster.devices.items():
        for quantity in filter(device.__dict__.__contains__, known.quantities):
            yield device, quantity, (quantity, _family(name), framework, "", "")
    links = [("intra", group.intra_node) for group in cluster.nodes] + [
        ("inter", cluster.inter_node)
    ]
    links += [("inter", group.inter_node) for group in cluster.nodes if group.inter_node]
    for side, link in links:
        for field in ("efficiency", "latency_us"):
            yield (
                link,
                field,
                (f"{side}_{field}", *_link_place(framework, side, link.bandwidth_GBps)),
            )


def _moved(known: Posterior, place: Place, value: float, distance: float) -> float:
    """Return a figure moved on its unbounded scale; one at the end of its range stays there."""
    scale = known.quantities[place[0]]["scale"]
    if scale == "share":
        return 1.0 / (1.0 + (1.0 / value - 1.0) * exp(-distance)) if 0.0 < value < 1.0 else value
    return float(scale["above"]) + (value - float(scale["above"])) * exp(distance)
