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

from darts_parallel.cost import Tensors
from darts_parallel.errors import Amounts, Entries
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
TOLERANCE = 1e-4
"""Relative change of the loss at which a fit ends."""
SMALLEST_STEP = 1e-4
"""Move of a latent number at which a linear problem is solved."""


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
        return Residuals(*(values[keep] for values in vars(self).values()))


def measured_figures(case: MeasuredCase) -> Amounts:
    """Return what was measured of a run, by the names of `PARTS`: seconds and bytes."""
    figures = zip(PARTS, (case.run.iteration_s, case.run.memory_bytes), strict=True)
    return {part: figure for part, figure in figures if figure is not None}


def residuals(cases: Sequence[MeasuredCase], parameters: Parameters, latent: Tensor) -> Residuals:
    """Compute errors and Jacobian at `latent`, one backward pass for each figure.

    The graph reaches from a figure to the few values of its place; the chain rule to the latent numbers
    is applied after it.
    """
    rows = []
    known: dict[Place, tuple[Tensors, Tensor]] = {}
    for i, case in enumerate(cases):
        place = Place.of_run(case.run)
        if place not in known:
            known[place] = _values_and_slopes(parameters, latent, place)
        leaves, to_latent = known[place]
        prediction = predict(case, leaves)
        for part, measured in measured_figures(case).items():
            error = torch.log(getattr(prediction, part)) - log(measured)
            given: Entries = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            slopes = torch.stack(torch.autograd.grad(error, list(leaves.values()), **given))
            mixture = case.problem.model.has_experts
            rows.append((i, PARTS.index(part), error.detach(), slopes @ to_latent, mixture))
    numbers, parts, errors, gradients, mixtures = zip(*rows, strict=True)
    return Residuals(
        torch.tensor(numbers),
        torch.tensor(parts),
        torch.stack(errors),
        torch.stack(gradients),
        torch.tensor(mixtures),
    )


def _values_and_slopes(
    parameters: Parameters, latent: Tensor, place: Place
) -> tuple[Tensors, Tensor]:
    """Compute values at a place as leaves of a graph, and d value / d latent, `(values, P)`."""
    start = latent.detach().requires_grad_()
    values = parameters.values(start, place)
    slopes = [torch.autograd.grad(value, start, retain_graph=True)[0] for value in values.values()]
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    return leaves, torch.stack(slopes)


def fit(
    cases: Sequence[MeasuredCase],
    parameters: Parameters,
    start: Tensor | None = None,
    steps: int = STEPS,
) -> tuple[Tensor, Residuals]:
    """Find the latent numbers that fit the runs best, and the residuals there; print every step.

    Dense runs are fitted first, then mixtures by the figures of experts alone: what releases of their
    framework change, and no plan explains, must not bend what dense runs say (a cut between modules: Plummer
    2015, Statistics and Computing 25, section 2).

    Args:
        start: Where to begin; the prior's mean without it.
        steps: Most steps of the dense runs, and then of the mixtures.
    """
    latent = parameters.zero() if start is None else start
    for experts in (False, True):
        own = [case for case in cases if case.problem.model.has_experts == experts]
        if own:
            problem = _Problem(parameters, experts)
            latent = problem.minimum(partial(residuals, own, parameters), latent, steps)
    return latent, residuals(cases, parameters, latent)


def linear_fit(found: Residuals, latent: Tensor, parameters: Parameters) -> Tensor:
    """Find the minimum of the problem linearized at `latent`, in the two steps of `fit`."""
    moved = latent
    for experts in (False, True):
        own = found.where(found.mixture == experts)
        moved = _Problem(parameters, experts).linear_minimum(own, latent, moved)
    return moved


@dataclass(frozen=True)
class _Problem:
    """Huber's loss of figures plus the priors over the latent numbers of experts, or all others."""

    parameters: Parameters
    experts: bool

    @property
    def free(self) -> Tensor:
        """Latent numbers that move, `(P,)`."""
        return self.parameters.of_experts == self.experts

    @property
    def prior(self) -> Tensor:
        """Weights of the squares of the latent numbers, `(P,)`."""
        return torch.where(self.free, self.parameters.sd**-2, 0.0)

    def loss(self, found: Residuals, latent: Tensor) -> float:
        """Return the loss of figures at latent numbers."""
        size = found.error.abs() / found.sigma
        huber = torch.where(size > HUBER, 2 * HUBER * size - HUBER**2, size**2)
        return float(huber.sum() + self.prior @ latent**2)

    def minimum(self, figures: Callable[[Tensor], Residuals], start: Tensor, steps: int) -> Tensor:
        """Minimize the loss: solve the problem linearized here, and go there as far as the loss falls.

        An evaluation takes half a minute and a linear problem a second.
        """
        latent = start
        found = figures(start)
        lowest = self.loss(found, latent)
        for step in range(steps):
            target = self.linear_minimum(found, latent, latent)
            for tries in range(DAMPINGS):
                there = latent + 0.5**tries * (target - latent)
                tried = figures(there)
                if (now := self.loss(tried, there)) < lowest:
                    break
            else:
                break
            gain = 1.0 - now / lowest
            latent = there
            found = tried
            lowest = now
            print(f"step {step + 1}: loss {lowest:.2f}")
            if gain < TOLERANCE:
                break
        return latent

    def linear_minimum(self, found: Residuals, latent: Tensor, start: Tensor) -> Tensor:
        """Minimize the loss of the figures linearized at `latent` by reweighted squares.

        Holland and Welsch 1977, Communications in Statistics A6.
        """
        free = self.free
        slopes = found.jacobian[:, free]
        moved = start
        for _ in range(STEPS):
            here = replace(found, error=found.error + found.jacobian @ (moved - latent))
            curvature = slopes.T @ (here.weight.unsqueeze(1) * slopes)
            curvature = curvature + torch.diag(self.prior[free])
            gradient = slopes.T @ (here.weight * here.error) + (self.prior * moved)[free]
            step = torch.linalg.solve(curvature, gradient)
            moved = moved.clone()
            moved[free] -= step
            if bool((step.abs() < SMALLEST_STEP).all()):
                break
        return moved


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
