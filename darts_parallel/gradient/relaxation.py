"""Soft operators: logits to weights, stage edges to soft stages, smooth maxima, schedules."""

from dataclasses import dataclass

import torch
from torch import Tensor


def softmax_weights(logits: Tensor, allowed: Tensor, temperature: float) -> Tensor:
    """Weights of the allowed choices, summing to 1 over the last axis.

    Args:
        logits: Shape `(..., C)`.
        allowed: Bool, broadcastable to it; at least one choice of each row is allowed.
        temperature: Above 0; near 0 the largest logit takes all.
    """
    return torch.softmax(logits.masked_fill(~allowed, -torch.inf) / temperature, dim=-1)


def gumbel_weights(logits: Tensor, allowed: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A one-hot sample whose gradient is that of the softmax (straight-through).

    Jang, Gu, Poole 2017 (arXiv 1611.01144), section 2.2. Shapes as `softmax_weights`.
    """
    uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
    noise = -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-12)))
    return straight_through(softmax_weights(logits + noise, allowed, temperature))


def straight_through(soft: Tensor) -> Tensor:
    """One-hot at the largest weight of the last axis, with the gradient of `soft`.

    Bengio, Leonard, Courville 2013 (arXiv 1308.3432), section 3.
    """
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return hard + soft - soft.detach()


def stage_edges(widths: Tensor, num_units: int) -> Tensor:
    """Monotone positions of the inner stage edges, in layers.

    Args:
        widths: Free parameters, shape `(..., K)`.
        num_units: Layers that may be divided; every stage keeps at least half a layer.

    Returns:
        Edges between stages, shape `(..., K - 1)`, strictly rising in (0, num_units).
    """
    pp = widths.shape[-1]
    least = 0.5 / num_units if pp * 0.5 < num_units else 0.0
    shares = least + (1.0 - pp * least) * torch.softmax(widths, dim=-1)
    return num_units * shares.cumsum(-1)[..., :-1]


def soft_stages(edges: Tensor, num_layers: int, temperature: float) -> Tensor:
    """Weight of every stage for every layer, contiguous by construction.

    Args:
        edges: Rising, shape `(..., K - 1)`; layer l has its centre at l + 0.5.
        num_layers: L.
        temperature: Of the sigmoid edges, in layers.

    Returns:
        Shape `(..., L, K)`, summing to 1 over K.
    """
    centres = torch.arange(num_layers, dtype=edges.dtype) + 0.5
    passed = torch.sigmoid((centres.unsqueeze(-1) - edges.unsqueeze(-2)) / temperature)
    first = (
        torch.ones_like(passed[..., :1]) if edges.shape[-1] else torch.ones(*edges.shape[:-1], num_layers, 1)
    )
    beyond = torch.cat([first.to(edges.dtype), passed], dim=-1)
    return beyond - torch.cat([passed, torch.zeros_like(beyond[..., :1])], dim=-1)


def smooth_max(values: Tensor, sharpness: float | None, dim: int = -1) -> Tensor:
    """`logsumexp` maximum of positive values, relative to their detached maximum.

    At most `log(n) / sharpness` (relative) above the maximum; `sharpness=None` is the maximum itself.
    """
    if sharpness is None:
        return values.amax(dim)
    scale = values.detach().amax(dim, keepdim=True).clamp(min=1e-300)
    soft = torch.logsumexp(sharpness * values / scale, dim=dim) / sharpness
    return soft * scale.squeeze(dim)


def geometric(start: float, end: float, step: int, num_steps: int) -> float:
    """Value at `step` of a geometric schedule from `start` to `end` over `num_steps` steps."""
    progress = step / max(num_steps - 1, 1)
    return float(start * (end / start) ** progress)


@dataclass(frozen=True)
class Schedules:
    """The annealed quantities at one step."""

    temperature: float
    boundary_temperature: float
    sharpness: float
    hard_stages: bool = False
    """Stage weights are rounded in the forward pass (straight-through)."""
    hard_choices: bool = False
    """So are strategy weights."""
