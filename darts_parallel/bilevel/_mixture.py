"""Classic DARTS: the slope of a mixture's validation loss in its weights, for the ablation.

First order takes the model's weights as given; second order differentiates through one weight step (Liu,
Simonyan, Yang 2019, arXiv 1806.09055, section 2.3). Their finite difference of twice 0.01 sees the jumps of
rounding, not its slope; double backward through the straight-through estimator has no such step size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.bilevel._quantize import Pair, flatten_layer, round_blocks
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.transformer import Weights

MixedLoss = Callable[[Weights, Tensor, Tensor], Tensor]
"""Model, tokens and weights of the forward pairs `(blocks, K)` to nats."""


@dataclass(frozen=True)
class Slopes:
    """Derivatives of one validation loss, nats."""

    loss: float
    by_pair: Tensor
    """In the weights of the forward pairs, `(blocks, K)`."""
    by_weight: Weights
    """In the model's weights, where the loss was taken."""


def slopes(
    loss: MixedLoss,
    model: Weights,
    pair_weights: Tensor,
    validation: Tensor,
    train: Tensor,
    step: Weights | None = None,
) -> Slopes:
    """Differentiate the validation loss: as it is, or after one weight step, by double backward.

    Args:
        loss: Loss of the mixed model.
        model: Weights, before the step.
        pair_weights: Weights of the forward pairs, `(blocks, K)`.
        validation: Validation bytes, `(B, T + 1)`.
        train: Training bytes of the step, `(B, T + 1)`.
        step: Learning rate of every weight; the step is its product with the training gradient. None takes
            the weights as given (first order).
    """
    pairs = pair_weights.detach().clone().requires_grad_()
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.items()}
    ahead = leaves
    if step is not None:
        inner = torch.autograd.grad(loss(leaves, train, pairs), tuple(leaves.values()), create_graph=True)
        ahead = {
            name: weight - step[name] * gradient
            for (name, weight), gradient in zip(leaves.items(), inner, strict=True)
        }
    value = loss(ahead, validation, pairs)
    by_pair, *by_weight = torch.autograd.grad(value, (pairs, *ahead.values()))
    return Slopes(float(value.detach()), by_pair, dict(zip(ahead, by_weight, strict=True)))


def gradient_shortfall(
    trainer: WeightTrainer, by_weight: Weights, mean: Sequence[Tensor], pairs: Sequence[Pair]
) -> Tensor:
    """Return the share of a step's progress on validation bytes that each pair lacks, `(blocks, K)`.

    A step along a gradient lowers the validation loss by the inner product of the two. What error feedback
    delivers later is not seen: the figure overrates what compressed gradients cost.

    Args:
        trainer: Whose step is meant.
        by_weight: Gradient of the validation loss.
        mean: Exact mean gradients by block, `(P,)`.
        pairs: K data-parallel degrees and bits.
    """
    scale = trainer.preconditioner()
    stepped = {name: (scale[name] * gradient).unsqueeze(0) for name, gradient in by_weight.items()}
    rows, total = [], 0.0
    for index, exact in enumerate(mean):
        direction = flatten_layer(stepped, trainer.block_names(index)).squeeze(0)
        sent = {bits: round_blocks(exact.unsqueeze(0), bits)[0] for _, bits in pairs}
        rows.append(torch.stack([(exact - sent[bits]) @ direction for _, bits in pairs]))
        total += float(exact @ direction)
    lacking = torch.stack(rows).double()
    return lacking / total if total > 0.0 else torch.zeros_like(lacking)
