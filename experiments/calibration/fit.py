"""Maximum a posteriori fit of the parameters: robust least squares on logarithmic errors.

The Jacobian comes from autograd through the cost model. Errors are weighed by Huber's rule, so that a
disturbed run pulls no more than a bad one; priors are further residuals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log

import torch
from torch import Tensor

from experiments.calibration.calibrated import Parameters, Place
from experiments.calibration.predict import predict
from experiments.calibration.problems import MeasuredCase

SIGMA = 0.06
"""Spread of log(predicted / measured) that a good model leaves: two releases of the same framework differ
by 3 % median and 15 % at most (README of the measurements)."""
SIGMA_OF_MIXTURES = 0.15
"""Spread for mixtures of experts: releases of one framework run one and the same mapping of Qwen3-235B on
256 H100 in 15.4, 17.6, 19.7 and 25.5 s."""
INFORMED = 0.999
"""Posterior standard deviation, per that of the prior, from which on no run says anything."""
HUBER = 1.5
"""Errors beyond so many sigma count linearly."""
PARTS = ("seconds", "memory")
STEPS = 60
DAMPINGS = 7
TOLERANCE = 1e-5
"""Relative change of the loss at which a fit ends."""

Tell = Callable[[str], None]
"""Prints the progress of a fit."""


def silent(line: str) -> None:
    """Print nothing."""


@dataclass(frozen=True)
class Residuals:
    """Logarithmic errors of N figures (seconds or bytes of a run) and their Jacobian."""

    case: Tensor
    """Index of the run, `(N,)`."""
    part: Tensor
    """Index in `PARTS`, `(N,)`."""
    error: Tensor
    """log(predicted / measured), `(N,)`."""
    jacobian: Tensor
    """d error / d latent, `(N, P)`."""
    mixture: Tensor
    """Whether the run is of a mixture of experts, `(N,)`."""

    @property
    def sigma(self) -> Tensor:
        """Return the spread of each error that a good model leaves, `(N,)`."""
        return torch.where(self.mixture, SIGMA_OF_MIXTURES, SIGMA).to(torch.float64)

    @property
    def weight(self) -> Tensor:
        """Return what the square of each error counts in Huber's loss, `(N,)`."""
        outside = HUBER * self.sigma / self.error.abs().clamp(min=1e-12)
        return torch.clamp(outside, max=1.0) / self.sigma**2

    def where(self, keep: Tensor) -> "Residuals":
        """Return the figures whose place in `keep`, `(N,)`, is true."""
        return Residuals(
            self.case[keep],
            self.part[keep],
            self.error[keep],
            self.jacobian[keep],
            self.mixture[keep],
        )


def measured_figures(case: MeasuredCase) -> dict[str, float]:
    """Return what was measured of a run, by the names of `PARTS`: seconds and bytes."""
    figures = zip(PARTS, (case.run.iteration_s, case.run.memory_bytes), strict=True)
    return {part: figure for part, figure in figures if figure is not None}


def residuals(cases: Sequence[MeasuredCase], parameters: Parameters, latent: Tensor) -> Residuals:
    """Compute errors and Jacobian at `latent`, one backward pass for each figure.

    The graph reaches from a figure to the few values of its place; the chain rule to the latent numbers
    is applied after it.
    """
    rows = []
    kinds = []
    errors = []
    gradients = []
    mixtures = []
    known: dict[Place, tuple[dict[str, Tensor], Tensor]] = {}
    for i, case in enumerate(cases):
        place = Place.of_run(case.run)
        if place not in known:
            known[place] = _values_and_slopes(parameters, latent, place)
        leaves, to_latent = known[place]
        prediction = predict(case, leaves)
        figures = measured_figures(case)
        for part, measured in figures.items():
            error = torch.log(getattr(prediction, part)) - log(measured)
            more = part != list(figures)[-1]
            slopes = torch.autograd.grad(
                error, list(leaves.values()), retain_graph=more, allow_unused=True
            )
            found = torch.stack([torch.zeros_like(error) if s is None else s for s in slopes])
            rows.append(i)
            kinds.append(PARTS.index(part))
            errors.append(error.detach())
            gradients.append(found @ to_latent)
            mixtures.append(case.problem.model.has_experts)
    return Residuals(
        torch.tensor(rows),
        torch.tensor(kinds),
        torch.stack(errors),
        torch.stack(gradients),
        torch.tensor(mixtures),
    )


def _values_and_slopes(
    parameters: Parameters, latent: Tensor, place: Place
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute values at a place as leaves of a graph, and d value / d latent, `(values, P)`."""
    start = latent.detach().requires_grad_()
    values = parameters.values(start, place)
    slopes = [torch.autograd.grad(value, start, retain_graph=True)[0] for value in values.values()]
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    return leaves, torch.stack(slopes)


Fit = tuple[Tensor, Residuals]
"""Latent numbers, and the residuals there."""


def fit(
    cases: Sequence[MeasuredCase],
    parameters: Parameters,
    start: Tensor | None = None,
    steps: int = STEPS,
    tell: Tell = silent,
) -> Fit:
    """Find the latent numbers that fit the runs best, and the residuals there.

    Dense runs are fitted first, then mixtures by the figures of experts alone: what releases of their
    framework change, and no plan explains, must not bend what dense runs say (a cut between modules: Plummer
    2015, Statistics and Computing 25, section 2).

    Args:
        start: Where to begin; the prior's mean without it.
        steps: Most steps of the dense runs, and then of the mixtures.
        tell: Gets a line after every step.
    """
    latent = parameters.zero() if start is None else start
    for experts in (False, True):
        own = [case for case in cases if case.problem.model.has_experts == experts]
        if own:
            figures = partial(residuals, own, parameters)
            latent = _minimum(figures, latent, parameters, experts, steps, tell)
    return latent, residuals(cases, parameters, latent)


def linear_fit(found: Residuals, latent: Tensor, parameters: Parameters) -> Tensor:
    """Find the minimum of the problem linearized at `latent`, in the two steps of `fit`."""
    moved = latent
    for experts in (False, True):
        own = found.where(found.mixture == experts)

        def linear(x: Tensor, own: Residuals = own) -> Residuals:
            return replace(own, error=own.error + own.jacobian @ (x - latent))

        moved = _minimum(linear, moved, parameters, experts, STEPS, silent)
    return moved


def _minimum(
    figures: Callable[[Tensor], Residuals],
    start: Tensor,
    parameters: Parameters,
    experts: bool,
    steps: int,
    tell: Tell,
) -> Tensor:
    """Minimize Huber's loss of figures plus the priors over the latent numbers of experts, or all others.

    Reweighted Gauss-Newton steps (Holland and Welsch 1977), each damped in the metric of the priors until the
    loss falls (Levenberg and Marquardt): what the runs determine well still moves.
    """
    free = parameters.of_experts == experts
    prior = torch.where(free, parameters.sd**-2, 0.0)

    def loss(found: Residuals, latent: Tensor) -> float:
        size = found.error.abs() / found.sigma
        huber = torch.where(size > HUBER, 2 * HUBER * size - HUBER**2, size**2)
        return float(huber.sum() + prior @ latent**2)

    latent = start
    found = figures(start)
    lowest = loss(found, latent)
    for step in range(steps):
        slopes = found.jacobian[:, free]
        weight = found.weight
        curvature = slopes.T @ (weight.unsqueeze(1) * slopes)
        gradient = slopes.T @ (weight * found.error) + (prior * latent)[free]
        for tries in range(DAMPINGS):
            damped = curvature + torch.diag(4.0**tries * prior[free])
            there = latent.clone()
            there[free] -= torch.linalg.solve(damped, gradient)
            tried = figures(there)
            if (now := loss(tried, there)) < lowest:
                break
        else:
            break
        gain = 1.0 - now / lowest
        latent = there
        found = tried
        lowest = now
        tell(f"step {step + 1}: loss {lowest:.2f}")
        if gain < TOLERANCE:
            break
    return latent


def posterior(found: Residuals, parameters: Parameters) -> Tensor:
    """Return the covariance of the latent numbers by Laplace's rule at an optimum, `(P, P)`.

    It is the inverse curvature of Huber's loss (its reweighted squares) and the priors, where mixtures tell
    of the figures of experts alone. Numbers of which no run says anything are as wide as `priors.yaml` says.
    """
    told = torch.where(found.mixture.unsqueeze(1) & ~parameters.of_experts, 0.0, found.jacobian)
    curvature = told.T @ (found.weight.unsqueeze(1) * told) + torch.diag(1.0 / parameters.sd**2)
    covariance: Tensor = torch.linalg.inv(curvature)
    untold = torch.diagonal(covariance).sqrt() >= INFORMED * parameters.sd
    wider = torch.where(untold, parameters.unseen_sd**2 - parameters.sd**2, 0.0)
    return (covariance + covariance.T) / 2.0 + torch.diag(wider)
