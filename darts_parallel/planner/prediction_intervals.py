"""How sure an answer is: 80 % intervals of seconds and bytes, and which plans cannot be told apart.

The logarithm of a figure is off by a normal error, whose variance `figure_posterior` knows: through
the plan's elasticities, and by what no parameter explains. Intervals hold 80 % of the runs of
sources and model families that were left out (`experiments/results/validation.md` tells how many
they hold).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log, sqrt

import torch
from torch import Tensor

from darts_parallel.config import NARROW, RunConfig
from darts_parallel.cost import CostBreakdown, evaluate, float_tensor, hard_plan, static_bytes_of
from darts_parallel.planner.figure_posterior import (
    FACTORS,
    NORMAL,
    RESERVED,
    STATE,
    LatentPlace,
    Posterior,
    Slopes,
    family,
    link_place,
    posterior,
)
from darts_parallel.plans import Plan
from darts_parallel.problem import CONTEXT_GIB, GIB, MICROSECONDS, Device, Problem

DIRECTIONS = 6
"""Widest directions of the errors of a job's bytes; the others are below the residual."""
DRAWS = 1024
"""Points of the integral over these directions; a power of two balances Sobol sequences."""
ON_DEVICE = "device"
"""Scope of the latent numbers of a device."""
NARROW_SHARES = [f"{name}_efficiency" for name in NARROW]
"""Calibrated shares of products below 16 bits."""
LINK_QUANTITIES = {"bandwidth": "efficiency", "latency": "latency_us"}
"""Calibrated figure of a link that stands for one of its fields."""


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


def intervals(
    plan: Plan,
    problem: Problem,
    cost: CostBreakdown,
    elasticities: Mapping[str, float],
) -> Intervals | None:
    """Return 80 % intervals of a plan's seconds and bytes.

    Args:
        elasticities: Of its seconds in every figure of the hardware (`sensitivity`).

    Returns:
        None without elasticities (`cost=searcher`).
    """
    if not elasticities:
        return None
    known = posterior(problem)
    variance = known.variance(time_slopes(known, problem, elasticities))
    half = NORMAL * sqrt(variance + known.seconds_spread(problem.cluster) ** 2)
    covariance = known.covariances(memory_slopes(plan, problem))
    spread = known.residuals.memory
    sd = (covariance.diagonal() + spread**2).sqrt()
    used = float_tensor(cost.memory_bytes)
    room = free_share(cost, problem.usable)
    half_bytes = NORMAL * sd * used
    lower = (used - half_bytes).clamp(min=0.0).tolist()
    upper = (used + half_bytes).tolist()
    bytes_ = tuple(zip(lower, upper, strict=True))
    middle = cost.iteration_time_s
    seconds = (middle * exp(-half), middle * exp(half))
    chances = tuple(torch.special.ndtr(-room / sd).tolist())
    job_chance = any_above(room, covariance, spread)
    return Intervals(seconds, half, bytes_, chances, job_chance, known.difference)


def out_of_memory(plan: Plan, problem: Problem, peaks: Sequence[RunConfig] = ()) -> float | None:
    """Return the probability that a job runs out of memory; None where the cost model has no memory.

    Args:
        peaks: Measured bytes of other plans (`run_figures.memory_run`); they move what plans share.
    """
    if not problem.config.cost.knows_stages:
        return None
    known = posterior(problem)
    # the figures of the cluster are those after its own runs already
    runs = [replace(run, error=0.0) for run in known.runs]
    given = replace(known, runs=[*runs, *peaks])
    moved = given.given_runs(memory_slopes(plan, problem))
    room = free_share(evaluate(plan, problem), problem.usable) - moved.means
    return any_above(room, moved.covariance, known.residuals.memory)


def free_share(cost: CostBreakdown, usable: float) -> Tensor:
    """Return the bytes left per predicted byte of every stage, `(K,)`.

    Errors of bytes add in bytes: a longer sequence adds bytes and error, and leaves less room.

    Args:
        usable: Share of a device's memory that the plan may fill.
    """
    return usable * float_tensor(cost.capacity_bytes) / float_tensor(cost.memory_bytes) - 1.0


def any_above(room: Tensor, covariance: Tensor, spread: float) -> float:
    """Return the probability that some of K jointly normal errors exceeds its room.

    Args:
        room: Bytes left per predicted byte, `(K,)`; errors are per predicted byte, too.
        covariance: Of the errors, as far as calibrated figures of the stages make them, `(K, K)`.
        spread: Standard deviation of the error that all stages share. It is integrated in closed
            form, the covariance along its `DIRECTIONS` widest directions by a fixed Sobol sequence.
    """
    values, vectors = torch.linalg.eigh(covariance)
    count = min(DIRECTIONS, len(room))
    scales = values[-count:].clamp(min=0.0).sqrt()
    root = vectors[:, -count:] * scales
    sobol = torch.quasirandom.SobolEngine(count)  # type: ignore[no-untyped-call]
    uniform = sobol.draw(DRAWS, dtype=torch.float64) + 0.5 / DRAWS
    errors = torch.special.ndtri(uniform) @ root.T
    least = (room - errors).amin(1)
    return float(torch.special.ndtr(-least / spread).mean())


def time_slopes(known: Posterior, problem: Problem, elasticities: Mapping[str, float]) -> Slopes:
    """Return d log(seconds) / d latent parameter of every calibrated quantity.

    Args:
        elasticities: Of the plan's seconds in every figure of the hardware, by their names.
    """
    slopes: dict[LatentPlace, float] = {}
    for name, elasticity in elasticities.items():
        owner, _, field = name.rpartition(".")
        if not elasticity or not field:
            continue
        if owner.startswith("devices."):
            place, value = _device_figure(problem, owner.removeprefix("devices."), field)
        else:
            place, value = _link_figure(problem, owner, field)
        if place.quantity in known.quantities:
            # a share near 1 looks safe on its own scale, also on a device without any run
            unseen = place.quantity in NARROW_SHARES
            unseen &= (place.quantity, ON_DEVICE, place.device) not in known.keys
            unit = 1.0 if unseen else known.per_unit(place.quantity, value)
            slopes[place] = slopes.get(place, 0.0) + elasticity * unit
    return slopes


def _device_figure(problem: Problem, name: str, field: str) -> tuple[LatentPlace, float]:
    """Return where a field of a device is calibrated, and its value in the unit of the quantity."""
    groups = problem.cluster.groups
    device = next(group.device for group in groups if group.device.name == name)
    value = float(getattr(device, field))
    quantity = field
    if field in MICROSECONDS:
        quantity = f"{field}_us"
        value *= 1e6
    if field == "fp8_efficiency":
        quantity = f"{problem.training.precision}_efficiency"
    return LatentPlace(quantity, family(name), problem.software.name), value


def _link_figure(problem: Problem, owner: str, field: str) -> tuple[LatentPlace, float]:
    """Return where a field of a link is calibrated, and its value; latencies count from their preset."""
    cluster = problem.config.cluster
    index = int(owner.split(".")[1]) if owner.startswith("nodes.") else 0
    group = cluster.nodes[min(index, len(cluster.nodes) - 1)]
    if owner.endswith("inter_node"):
        side = "inter"
        own = group.inter_node if owner.startswith("nodes.") else None
        link = own or cluster.inter_node
    else:
        side = "intra"
        link = group.intra_node
    quantity = f"{side}_{LINK_QUANTITIES.get(field, field)}"
    rate = float(link.bandwidth_GBps)
    place = link_place(quantity, problem.software.name, side, rate)
    if field == "latency":
        return place, 1.0
    return place, float(link.efficiency)


def memory_slopes(plan: Plan, problem: Problem) -> list[dict[LatentPlace, float]]:
    """Return d log(bytes) / d latent parameter of every stage; bytes are linear in each of the factors."""
    devices = problem.cluster.arranged(plan.node_order).stage_devices(plan.pp)
    table, hard, cost = hard_plan(plan, problem)
    bytes_ = cost.memory[0]
    reserved = float_tensor([float(device.reserved) for device in devices])
    total = bytes_ + reserved
    shares = {RESERVED: (reserved - CONTEXT_GIB * GIB).clamp(min=0.0) / total}
    if table.host is None:
        # all that is static is state
        shares[STATE] = static_bytes_of(table, hard)[0] / total
    for factor in (factor for factor in FACTORS if factor not in shares):
        # remembered, with the prices of its plans: a report asks three times
        more = problem.with_devices(partial(_doubled, factor=factor))
        doubled = problem.doubled.setdefault(factor, more)
        twice = hard_plan(plan, doubled)[2].memory[0]
        shares[factor] = (twice - bytes_) / total
    framework = problem.software.name
    slopes = []
    for stage, device in enumerate(devices):
        own = {}
        for quantity, share in shares.items():
            own[LatentPlace(quantity, family(device.name), framework)] = float(share[stage])
        slopes.append(own)
    return slopes


def _doubled(device: Device, factor: str) -> Device:
    """Return a device with twice a factor of its bytes."""
    return replace(device, **{factor: 2.0 * float(getattr(device, factor))})  # type: ignore[arg-type]
