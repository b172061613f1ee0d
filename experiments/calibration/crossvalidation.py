"""Held-out error: parameters fitted without a whole model or a whole source, then tried on it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.calibration.errors import ErrorSummary, summarise
from experiments.calibration.fit import PARTS, Residuals, residuals, step
from experiments.calibration.parameters import Parameters
from experiments.calibration.predict import place_of, predict
from experiments.calibration.problems import Case


@dataclass(frozen=True)
class HeldOut:
    """A run predicted with parameters that never saw its fold."""

    fold: str
    case: Case
    seconds: float
    memory_bytes: float


def folds(cases: Sequence[Case], kind: str) -> dict[str, set[int]]:
    """Indices of runs by fold: `model` (the name of the model) or `source` (the file)."""
    members: dict[str, set[int]] = defaultdict(set)
    for i, case in enumerate(cases):
        row = case.run.row
        members[row.text("model") if kind == "model" else row.file].add(i)
    return dict(sorted(members.items()))


def cross_validate(
    cases: Sequence[Case],
    parameters: Parameters,
    optimum: Tensor,
    found: Residuals,
    kind: str,
    *,
    refinements: int = 1,
    progress: Callable[[str], None] = lambda fold: None,
) -> list[HeldOut]:
    """Predict every fold with parameters fitted to all others.

    Args:
        optimum: Fit to all runs; a fold's fit starts there and takes Gauss-Newton steps without the fold.
        found: Errors and Jacobian at `optimum`.
        refinements: Steps with a Jacobian of their own after the first, which shares that of `found`.
    """
    result = []
    for fold, held_out in folds(cases, kind).items():
        progress(fold)
        latent = step(found.without(held_out), optimum, parameters, 0.0, rounds=20)
        others = [case for i, case in enumerate(cases) if i not in held_out]
        for _ in range(refinements if others else 0):
            latent = step(residuals(others, parameters, latent), latent, parameters, 1e-3, rounds=20)
        for i in sorted(held_out):
            with torch.no_grad():
                prediction = predict(cases[i], parameters.values(latent, place_of(cases[i])))
            result.append(HeldOut(fold, cases[i], float(prediction.seconds), float(prediction.memory)))
    return result


def held_out_errors(results: Sequence[HeldOut], part: str) -> dict[str, ErrorSummary]:
    """Errors of `seconds` or `memory` by fold and, under "all", of all runs."""
    values: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for result in results:
        run = result.case.run
        predicted = result.seconds if part == PARTS[0] else result.memory_bytes
        measured = run.iteration_s if part == PARTS[0] else run.memory_bytes
        if measured is not None:
            for name in (result.fold, "all"):
                values[name][0].append(predicted)
                values[name][1].append(measured)
    return {name: summarise(*pair) for name, pair in values.items()}
