"""Which of many parallel starts go on: those of low loss and large gradient."""

import torch
from torch import Tensor


def rank_starts(losses: Tensor, gradient_norms: Tensor) -> Tensor:
    """Starts in the order in which they deserve to go on.

    A start's rank is the sum of its ranks by loss (low first) and by gradient norm (large first: it
    still moves); equal sums go by the loss.

    Args:
        losses, gradient_norms: Shape `(..., N)`.

    Returns:
        Indices, best first, shape `(..., N)`.
    """
    by_loss = losses.argsort(dim=-1, stable=True).argsort(dim=-1)
    by_gradient = gradient_norms.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    count = losses.shape[-1]
    return torch.argsort((by_loss + by_gradient) * count + by_loss, dim=-1, stable=True)


def resample_sources(order: Tensor, survivors: int) -> Tensor:
    """The start that each place goes on from, survivors first and then their copies in turn.

    Args:
        order: Starts by `rank_starts`, shape `(..., N)`.
        survivors: Starts that stay, 1 to N.

    Returns:
        Indices, shape `(..., N)`.
    """
    turn = torch.arange(order.shape[-1]) % survivors
    return order[..., turn]
