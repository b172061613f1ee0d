"""Held-out predictions: parameters fitted without a whole model, source or framework family, tried on it.

The posterior of the parameters does not explain everything: the variance of a prediction's logarithm is that
of its parameters (Laplace) plus that of release, tuning, disturbance, structure. This residual spread is read
off runs that were held out, in three steps of nearness: a framework family without any run, a source without
any run, a device and framework with runs of their own. It is the smallest spread whose 80 % interval holds
80 % of those runs, a fold counted as the root of its runs: what is asked for next is one more source, not one
more run of the source with the most, and yet the runs of one source are not all alike.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from darts_parallel.planner import EXPERTS, NORMAL
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, Residuals, linear_fit, measured_figures, posterior
from experiments.calibration.parameters import Parameters, Place
from experiments.calibration.predict import predict
from experiments.calibration.problems import MeasuredCase
from experiments.calibration.ranking import SMALLEST_GROUP, job_of

TOTALS = ("all dense", "all mixtures", "all")
KINDS = {"model": "model", "source": "file", "family": "framework_family"}
"""Kinds of folds that are left out as a whole, and the field of a run that names them."""
SHARE = 0.8
"""Share of the runs that an interval holds."""
ENOUGH = 8
"""Runs of a device and framework from which on their own spread counts more than the wider one."""
FLOOR = 0.015
"""Smallest spread: that of repeats is 1.0 % in the median and 4.6 % for nine of ten."""


@dataclass(frozen=True)
class HeldOut:
    """A figure of a run, predicted with parameters that never saw its fold."""

    fold: str
    case: MeasuredCase
    part: str
    """A name of `PARTS`."""
    predicted: float
    measured: float
    variance: float
    """Variance of the logarithm, by the posterior without the fold."""

    @property
    def error(self) -> float:
        """Return log(predicted / measured)."""
        return log(self.predicted / self.measured)


def folds(cases: Sequence[MeasuredCase], kind: str) -> dict[str, set[int]]:
    """Group the indices of runs by fold."""
    members: dict[str, set[int]] = defaultdict(set)
    for i, case in enumerate(cases):
        members[getattr(case.run, KINDS[kind])].add(i)
    return dict(sorted(members.items()))


def cross_validate(
    cases: Sequence[MeasuredCase], parameters: Parameters, optimum: Tensor, found: Residuals, kind: str
) -> list[HeldOut]:
    """Predict every fold with parameters fitted to all others.

    Args:
        cases: Measured runs.
        parameters: Index of the latent numbers.
        optimum: Fit to all runs; a fold's fit is the minimum of the problem linearized there.
        found: Errors and Jacobian at `optimum`.
        kind: A key of `KINDS`.
    """
    result = []
    rows = zip(found.case.tolist(), found.part.tolist(), found.jacobian, strict=True)
    slopes = {(i, PARTS[part]): row for i, part, row in rows}
    for fold, held_out in folds(cases, kind).items():
        rest = found.where(torch.tensor([i not in held_out for i in found.case.tolist()]))
        latent, covariance = linear_fit(rest, optimum, parameters), posterior(rest, parameters)
        for i in sorted(held_out):
            with torch.no_grad():
                prediction = predict(cases[i], parameters.values(latent, Place.of_run(cases[i].run)))
            for part, measured in measured_figures(cases[i]).items():
                variance = float(slopes[i, part] @ covariance @ slopes[i, part])
                predicted = float(getattr(prediction, part))
                result.append(HeldOut(fold, cases[i], part, predicted, measured, variance))
    return result


def fold_errors(held: Sequence[HeldOut]) -> dict[str, ErrorSummary]:
    """Summarize the errors by fold, then of the runs that `TOTALS` names."""
    values: dict[str, list[HeldOut]] = defaultdict(list)
    for h in held:
        for name in (h.fold, TOTALS[h.case.problem.model.has_experts], TOTALS[-1]):
            values[name].append(h)
    order = sorted(values, key=lambda name: (TOTALS.index(name) + 1 if name in TOTALS else 0, name))
    pairs = {name: [(h.predicted, h.measured) for h in values[name]] for name in order}
    return {name: summarise(*zip(*own, strict=True)) for name, own in pairs.items()}


def spread(held: Sequence[HeldOut]) -> float:
    """Find the smallest standard deviation, next to those of the parameters, whose interval holds `SHARE`.

    A fold weighs as much as the root of the number of its runs.
    """
    if not held:
        return FLOOR
    runs = Counter(h.fold for h in held)
    needed = sorted((max((h.error / NORMAL) ** 2 - h.variance, FLOOR**2), runs[h.fold] ** -0.5) for h in held)
    inside = np.cumsum([weight for _, weight in needed])
    return float(np.sqrt(needed[int(np.searchsorted(inside, SHARE * (1.0 - 1e-12) * inside[-1]))][0]))


def by_place(near: Sequence[HeldOut], wide: float) -> dict[str, float]:
    """Find the spreads of every device and framework with runs, drawn to that of all where there are few.

    Args:
        near: Runs predicted with other runs of their own framework.
        wide: Spread of all of them.
    """
    groups: dict[str, list[HeldOut]] = defaultdict(list)
    for h in near:
        groups[Place.of_run(h.case.run).name("device+framework")].append(h)
    result = {}
    for name, members in sorted(groups.items()):
        weight = len(members) / (len(members) + ENOUGH)
        result[name] = float(np.exp(weight * np.log(spread(members)) + (1 - weight) * np.log(wide)))
    return result


def coverage(held: Sequence[HeldOut]) -> float:
    """Count the share of held-out figures inside intervals whose spread was read off the other folds."""
    spreads = {fold: spread([h for h in held if h.fold != fold]) for fold in {h.fold for h in held}}
    return float(np.mean([abs(h.error) <= NORMAL * (h.variance + spreads[h.fold] ** 2) ** 0.5 for h in held]))


def pair_spread(held: Sequence[HeldOut]) -> float:
    """Find the standard deviation of the error of the difference of two plans of one measured job.

    From the errors of jobs around their own mean: what all plans of a job share does not tell them apart. Of
    every job the width whose 80 % interval holds 80 % of its pairs; of the jobs the median: a sweep of
    fifty plans is one job too.
    """
    jobs: dict[object, list[float]] = defaultdict(list)
    for h in held:
        jobs[job_of(h.case.run)].append(h.error)
    widths = [
        float(np.quantile([abs(a - b) for i, a in enumerate(errors) for b in errors[:i]], SHARE))
        for errors in jobs.values()
        if len(errors) >= SMALLEST_GROUP
    ]
    return float(np.median(widths)) / NORMAL if widths else FLOOR


def spreads(held_out: dict[str, list[HeldOut]]) -> dict[str, dict[str, Any]]:
    """Find the residual spreads by figure: of a framework, of a source without runs, of known places.

    Each is a standard deviation of log(predicted / measured) next to that of the parameters; `pair` that of
    the difference of two plans of one measured job. Mixtures have spreads of their own (`experts`).
    """
    dense, mixtures = (
        _spreads({kind: [h for h in held if h.case.problem.model.has_experts == own]
                  for kind, held in held_out.items()})
        for own in (False, True)
    )  # fmt: skip
    for part, own in mixtures.items():
        dense.setdefault(part, {})[EXPERTS] = own
    return dense


def _spreads(held_out: dict[str, list[HeldOut]]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        held = {kind: [h for h in own if h.part == part] for kind, own in held_out.items()}
        if not any(held.values()):
            continue
        wide = {kind: round(spread(members), 4) for kind, members in held.items() if members}
        known = next((held[kind] for kind in ("model", "source", "family") if held.get(kind)), [])
        result[part] = {**wide, "places": {k: round(v, 4) for k, v in by_place(known, spread(known)).items()}}
        jobs = next((held[kind] for kind in ("source", "family", "model") if held.get(kind)), [])
        if jobs and part == PARTS[0]:
            result[part]["pair"] = round(pair_spread(jobs), 4)
    return result
