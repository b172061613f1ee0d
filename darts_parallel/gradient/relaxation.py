"""Soft operators: logits to weights, stage boundaries to soft stages, smooth maxima, schedules."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor

from darts_parallel.config import SearchConfig


def softmax_weights(logits: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    """Return weights of the allowed choices, summing to 1 over the last axis.

    Args:
        logits: Shape `(..., C)`.
        allowed: Bool, broadcastable to `logits`; each row has at least one allowed choice.
        temperature: Above 0; near 0 the largest logit takes all.
    """
    masked = logits.masked_fill(~allowed, -torch.inf)
    return torch.softmax(masked / temperature, dim=-1)


def straight_through(soft: Tensor) -> Tensor:
    """Return one-hot at the largest weight of the last axis, with the gradient of `soft`.

    Bengio, Leonard, Courville 2013 (arXiv 1308.3432), section 3.
    """
    largest = soft.argmax(-1, keepdim=True)
    hard = torch.zeros_like(soft).scatter(-1, largest, 1.0)
    return hard + soft - soft.detach()


def stage_edges(widths: Tensor, num_units: int) -> Tensor:
    """Return rising positions of the inner stage boundaries, in layers.

    Args:
        widths: Free parameters, shape `(..., K)`.
        num_units: Layers that may be divided; every stage keeps at least half a layer.

    Returns:
        Boundaries between stages, shape `(..., K - 1)`, strictly rising in (0, num_units).
    """
    stages = widths.shape[-1]
    # every stage keeps half a unit where there are enough
    roomy = stages * 0.5 < num_units
    least = 0.5 / num_units if roomy else 0.0
    rest = 1.0 - stages * least
    shares = least + rest * torch.softmax(widths, dim=-1)
    return num_units * shares.cumsum(-1)[..., :-1]


def stage_widths(counts: Tensor, num_units: int) -> Tensor:
    """Return the free parameters by which stages have so many units, `(..., K)`: inverts `stage_edges`."""
    roomy = counts.shape[-1] * 0.5 < num_units
    return (counts - (0.5 if roomy else 0.0)).log()


def soft_stages(edges: Tensor, centres: Tensor, temperature: float) -> Tensor:
    """Return weight of every stage for every layer, contiguous by construction.

    Args:
        edges: Rising, shape `(..., K - 1)`.
        centres: Centre of every layer, where unit u has u + 0.5, shape `(L,)`.

    Returns:
        Shape `(..., L, K)`, summing to 1 over K.
    """
    distance = centres.unsqueeze(-1) - edges.unsqueeze(-2)
    passed = torch.sigmoid(distance / temperature)
    begun = torch.nn.functional.pad(passed, (1, 0), value=1.0)
    ended = torch.nn.functional.pad(passed, (0, 1))
    return begun - ended


def smooth_max(values: Tensor, sharpness: float | None, dim: int = -1) -> Tensor:
    """Return the `logsumexp` maximum of positive values, relative to their maximum.

    At most `log(n) / sharpness` (relative) above the maximum; `sharpness=None` is the maximum itself.
    The maximum is part of the gradient: without it the slope is up to 9 % off.
    """
    if sharpness is None:
        return values.amax(dim)
    largest = values.amax(dim, keepdim=True)
    scale = largest.clamp(min=1e-300)
    # no exponent is above 0
    exponents = values * (sharpness / scale) - sharpness
    total = torch.exp(exponents).sum(dim)
    relative = torch.log(total) / sharpness + 1.0
    return relative * scale.squeeze(dim)


def geometric(start: float, end: float, step: int, num_steps: int) -> float:
    """Return the value at `step` of a geometric schedule from `start` to `end`."""
    progress = step / max(num_steps - 1, 1)
    ratio = end / start
    return float(start * ratio**progress)


BOUNDARY_RATE = 0.05
"""Adam's step for the widths of stages."""
BOUNDARY_TEMPERATURES = (1.0, 0.1)
"""First and last temperature of the stage boundaries, in layers."""
HARD_STAGES_FROM = 0.5
"""Share of the steps from which stage weights are rounded in the forward pass: whole layers decide
what fits the memory."""


DECAY_FROM = 0.3
"""Share of the steps from which the learning rates fall, by half a cosine: at constant rates the stage
boundaries and the multipliers circle each other."""
LAST_RATE = 0.05
"""Share of the learning rates at the last step."""


SETTLING_RATE = 4.0
"""Factor on the learning rate of the logits at whole boundaries: few steps are left, and at fixed stages
large ones do not upset each other."""


@dataclass(frozen=True)
class Schedules:
    """The annealed quantities of one step."""

    temperature: float
    boundary_temperature: float
    sharpness: float
    hard_stages: bool = False
    """Stage weights are rounded in the forward pass (straight-through)."""
    rate: float = 1.0
    """Factor on the learning rates."""

    @staticmethod
    def at(config: SearchConfig, step: int, num_steps: int) -> "Schedules":
        """Return the quantities of step number `step` of `num_steps`."""

        def annealed(ends: Sequence[float]) -> float:
            return geometric(ends[0], ends[1], step, num_steps)

        temperature = annealed(config.temperature)
        boundary_temperature = annealed(BOUNDARY_TEMPERATURES)
        sharpness = annealed(config.sharpness)
        hard_stages = step >= HARD_STAGES_FROM * num_steps
        rate = _decayed_rate(step / num_steps)
        return Schedules(temperature, boundary_temperature, sharpness, hard_stages, rate)

    @staticmethod
    def settling(config: SearchConfig, progress: float) -> "Schedules":
        """Return the last quantities, but for learning rates that fall once more, over `progress` 0 to 1."""
        rate = SETTLING_RATE * _decayed_rate(progress)
        return Schedules(
            config.temperature[1],
            BOUNDARY_TEMPERATURES[1],
            config.sharpness[1],
            hard_stages=True,
            rate=rate,
        )


def _decayed_rate(progress: float) -> float:
    """Return the factor on learning rates after a share of the steps."""
    decayed = max(progress - DECAY_FROM, 0.0) / (1.0 - DECAY_FROM)
    return LAST_RATE + (1.0 - LAST_RATE) * (1.0 + cos(pi * decayed)) / 2.0
