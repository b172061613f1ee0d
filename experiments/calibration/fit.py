"""Maximum a posteriori fit of the parameters: Levenberg-Marquardt on logarithmic errors.

The Jacobian comes from autograd through the cost model. Errors are weighed by Huber's rule, so that a
disturbed run pulls no more than a bad one; priors are further residuals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from experiments.calibration.parameters import Parameters, Place
from experiments.calibration.predict import predict
from experiments.calibration.problems import Case

SIGMA = 0.06
"""Spread of log(predicted / measured) that a good model leaves: two releases of the same software differ
by 3 % median and 15 % at most (README of the measurements)."""
SIGMA_OF_MIXTURES = 0.15
"""The same of mixtures of experts: releases of one software run one and the same mapping of Qwen3-235B on 256
H100 in 15.4, 17.6, 19.7 and 25.5 s."""
HUBER = 1.5
"""Errors beyond so many sigma count linearly."""
PARTS = ("seconds", "memory")


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
        """Spread of each error that a good model leaves, `(N,)`."""
        return torch.where(self.mixture, SIGMA_OF_MIXTURES, SIGMA).to(torch.float64)

    def masked_jacobian(self, parameters: Parameters) -> Tensor:
        """The Jacobian of what each run informs, `(N, P)`: mixtures the figures of experts alone.

        What releases of their software change, and no plan explains, must not bend what dense runs say: a
        cut between modules (Plummer 2015, Statistics and Computing 25, section 2).
        """
        return torch.where(self.mixture.unsqueeze(1) & ~parameters.of_experts, 0.0, self.jacobian)

    def without(self, held_out: set[int]) -> "Residuals":
        """The figures of all other runs."""
        keep = torch.tensor([int(i) not in held_out for i in self.case.tolist()], dtype=torch.bool)
        return Residuals(
            self.case[keep], self.part[keep], self.error[keep], self.jacobian[keep], self.mixture[keep]
        )

    def weights(self, error: Tensor) -> Tensor:
        """Huber's weights at other errors of the same figures, `(N,)`."""
        return torch.clamp(HUBER * self.sigma / error.abs().clamp(min=1e-12), max=1.0) / self.sigma**2


def measured_figures(case: Case) -> dict[str, float]:
    """Return what was measured of a run, by the names of `PARTS`: seconds and bytes."""
    figures = zip(PARTS, (case.run.iteration_s, case.run.memory_bytes), strict=True)
    return {part: figure for part, figure in figures if figure is not None}


def residuals(cases: Sequence[Case], parameters: Parameters, latent: Tensor) -> Residuals:
    """Errors and Jacobian at `latent`, one backward pass for each figure.

    The graph reaches from a figure to the few values of its place; the chain rule to the latent numbers
    is applied after it.
    """
    rows, kinds, errors, gradients, mixtures = [], [], [], [], []
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
            slopes = torch.autograd.grad(error, list(leaves.values()), retain_graph=more, allow_unused=True)
            found = torch.stack([torch.zeros_like(error) if s is None else s for s in slopes])
            rows.append(i)
            kinds.append(PARTS.index(part))
            errors.append(error.detach())
            gradients.append(found @ to_latent)
            mixtures.append(case.problem.model.has_experts)
    return Residuals(
        torch.tensor(rows), torch.tensor(kinds), torch.stack(errors), torch.stack(gradients),
        torch.tensor(mixtures),
    )  # fmt: skip


def _values_and_slopes(
    parameters: Parameters, latent: Tensor, place: Place
) -> tuple[dict[str, Tensor], Tensor]:
    """Values at a place as leaves of a graph, and d value / d latent, `(values, P)`."""
    start = latent.detach().requires_grad_()
    values = parameters.values(start, place)
    slopes = [torch.autograd.grad(value, start, retain_graph=True)[0] for value in values.values()]
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    return leaves, torch.stack(slopes)


def objective(found: Residuals, latent: Tensor, parameters: Parameters) -> float:
    """Huber loss of the errors plus the priors."""
    z = (found.error / found.sigma).abs()
    huber = torch.where(z <= HUBER, 0.5 * z**2, HUBER * (z - 0.5 * HUBER))
    return float(huber.sum() + 0.5 * ((latent / parameters.sd) ** 2).sum())


def step(found: Residuals, latent: Tensor, parameters: Parameters, damping: float, rounds: int = 5) -> Tensor:
    """Minimum of the linearised problem near `latent`, by iteratively reweighted least squares."""
    move, masked = torch.zeros_like(latent), found.masked_jacobian(parameters)
    for _ in range(rounds):
        error = found.error + found.jacobian @ move
        weight = found.weights(error)
        prior = 1.0 / parameters.sd**2
        left = masked.T @ (weight.unsqueeze(1) * found.jacobian) + torch.diag(prior)
        left = left + damping * torch.diag(torch.diagonal(left))
        right = masked.T @ (weight * found.error) + prior * latent
        move = -torch.linalg.solve(left, right)
    return latent + move


def fit(
    cases: Sequence[Case],
    parameters: Parameters,
    start: Tensor | None = None,
    *,
    most_steps: int = 12,
    progress: Callable[[int, float], None] = lambda index, value: None,
) -> tuple[Tensor, Residuals]:
    """Latent numbers that fit the runs best, and the residuals there.

    Args:
        start: Where to begin; the prior's mean without it.
        progress: Called with the number and the objective of every step.
    """
    latent = parameters.zero() if start is None else start
    found = residuals(cases, parameters, latent)
    value, damping = objective(found, latent, parameters), 1.0 if start is None else 1e-3
    for index in range(most_steps):
        progress(index, value)
        proposal = step(found, latent, parameters, damping)
        tried = residuals(cases, parameters, proposal)
        new = objective(tried, proposal, parameters)
        if new < value:
            gain, latent, found, value = value - new, proposal, tried, new
            damping = max(damping / 10.0, 1e-6)
            if gain < 1e-3 * max(value, 1.0):
                break
        else:
            damping = max(damping * 30.0, 1e-2)
            if damping > 1.0:
                break
    return latent, found


def posterior(found: Residuals, latent: Tensor, parameters: Parameters) -> Tensor:
    """Covariance of the latent numbers by Laplace's rule at an optimum, `(P, P)`.

    The inverse curvature of Huber's loss (its reweighted squares) and the priors.
    """
    weight = found.weights(found.error)
    prior = 1.0 / parameters.sd**2
    masked = found.masked_jacobian(parameters)
    curvature = masked.T @ (weight.unsqueeze(1) * masked) + torch.diag(prior)
    covariance: Tensor = torch.linalg.inv(curvature)
    return (covariance + covariance.T) / 2.0
