"""Held-out error: parameters fitted without a whole model or a whole source, then tried on it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from experiments.calibration.coverage import Held
from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, Residuals, posterior, residuals, step
from experiments.calibration.parameters import Parameters
from experiments.calibration.predict import place_of, predict
from experiments.calibration.problems import Case

TOTALS = ("all dense", "all mixtures", "all")
KINDS = ("model", "source", "family")
"""What is left out as a whole: models by name, files, families of software."""


@dataclass(frozen=True)
class HeldOut:
    """A run predicted with parameters that never saw its fold."""

    fold: str
    case: Case
    seconds: float
    memory_bytes: float
    variance: dict[str, float]
    """Of the logarithm of each measured figure of `PARTS`, by the posterior without the fold."""

    def held(self, part: str) -> Held | None:
        """The figure as the spreads need it; None where it was not measured."""
        run = self.case.run
        predicted, measured = (
            (self.seconds, run.iteration_s) if part == PARTS[0] else (self.memory_bytes, run.memory_bytes)
        )
        if measured is None:
            return None
        place = place_of(self.case)
        return Held(self.fold, place.device, place.stack, log(predicted / measured), self.variance[part])


def folds(cases: Sequence[Case], kind: str) -> dict[str, set[int]]:
    """Indices of runs by fold: `model` (its name), `source` (the file), `family` (of the software)."""
    members: dict[str, set[int]] = defaultdict(set)
    for i, case in enumerate(cases):
        run = case.run
        name = {"model": run.row.text("model"), "source": run.row.file, "family": run.stack.family}[kind]
        members[name].add(i)
    return dict(sorted(members.items()))


def cross_validate(
    cases: Sequence[Case],
    parameters: Parameters,
    optimum: Tensor,
    found: Residuals,
    kind: str,
    *,
    refinements: int = 0,
    progress: Callable[[str], None] = lambda fold: None,
) -> list[HeldOut]:
    """Predict every fold with parameters fitted to all others.

    Args:
        optimum: Fit to all runs; a fold's fit starts there and takes Gauss-Newton steps without the fold.
        found: Errors and Jacobian at `optimum`.
        refinements: Steps with a Jacobian of their own after the first, which shares that of `found`.
    """
    result = []
    slopes = {
        (int(i), PARTS[int(part)]): row
        for i, part, row in zip(found.case, found.part, found.jacobian, strict=True)
    }
    for fold, held_out in folds(cases, kind).items():
        progress(fold)
        rest = found.without(held_out)
        latent = step(rest, optimum, parameters, 0.0, rounds=20)
        covariance = posterior(rest, optimum, parameters)
        others = [case for i, case in enumerate(cases) if i not in held_out]
        for _ in range(refinements if others else 0):
            latent = step(residuals(others, parameters, latent), latent, parameters, 1e-3, rounds=20)
        for i in sorted(held_out):
            with torch.no_grad():
                prediction = predict(cases[i], parameters.values(latent, place_of(cases[i])))
            variance = {
                part: float(slopes[i, part] @ covariance @ slopes[i, part])
                for part in PARTS
                if (i, part) in slopes
            }
            result.append(
                HeldOut(fold, cases[i], float(prediction.seconds), float(prediction.memory), variance)
            )
    return result


def held_out_errors(results: Sequence[HeldOut], part: str) -> dict[str, ErrorSummary]:
    """Errors of `seconds` or `memory` by fold, then of the runs that `TOTALS` names."""
    values: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for result in results:
        run = result.case.run
        predicted = result.seconds if part == PARTS[0] else result.memory_bytes
        measured = run.iteration_s if part == PARTS[0] else run.memory_bytes
        if measured is not None:
            for name in (result.fold, TOTALS[result.case.problem.model.has_experts], TOTALS[-1]):
                values[name][0].append(predicted)
                values[name][1].append(measured)
    return {name: summarise(*values[name]) for name in sorted(values, key=by_fold)}


def by_fold(name: str) -> tuple[int, str]:
    """Sorts the names of a table's lines: folds, then `TOTALS` in their order."""
    return (TOTALS.index(name) + 1 if name in TOTALS else 0), name
