"""Classic DARTS: the slope of a mixture's validation loss in its weights, for the ablation.

First order takes the model's weights as given; second order differentiates through one weight step (Liu,
Simonyan, Yang 2019, arXiv 1806.09055, section 2.3). Their finite difference of twice 0.01 sees the jumps of
rounding, not its slope; double backward through the straight-through estimator has no such step size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.bilevel.quantize import Pair, flatten_layer, round_blocks
from darts_parallel.bilevel.trainer import WeightTrainer
from darts_parallel.bilevel.transformer import Weights

MixedLoss = Callable[[Weights, Tensor, Tensor], Tensor]
"""Model, tokens and weights of the forward pairs `(blocks, K)` to nats."""


@dataclass(frozen=True)
class Slopes:
    """Of one validation loss, nats."""

    loss: float
    by_pair: Tensor
    """In the weights of the forward pairs, `(blocks, K)`."""
    by_weight: Weights
    """In the model's weights, where the loss was taken."""


def first_order(loss: MixedLoss, model: Weights, pair_weights: Tensor, tokens: Tensor) -> Slopes:
    """Slopes with the model's weights as given.

    Args:
        loss: Of the mixed model.
        model: Weights.
        pair_weights: Of the forward pairs, `(blocks, K)`.
        tokens: Validation bytes, `(B, T + 1)`.
    """
    pairs = pair_weights.detach().clone().requires_grad_()
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.items()}
    value = loss(leaves, tokens, pairs)
    found = torch.autograd.grad(value, (pairs, *leaves.values()))
    return Slopes(float(value.detach()), found[0], dict(zip(leaves, found[1:], strict=True)))


def second_order(
    loss: MixedLoss,
    model: Weights,
    pair_weights: Tensor,
    train: Tensor,
    validation: Tensor,
    step: Weights,
) -> Slopes:
    """Slopes of the validation loss after one weight step, by double backward.

    Args:
        loss: Of the mixed model.
        model: Weights before the step.
        pair_weights: Of the forward pairs, `(blocks, K)`.
        train: Training bytes of the step, `(B, T + 1)`.
        validation: Validation bytes.
        step: Learning rates of every weight: the step is their product with the training gradient.
    """
    pairs = pair_weights.detach().clone().requires_grad_()
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.items()}
    inner = torch.autograd.grad(loss(leaves, train, pairs), tuple(leaves.values()), create_graph=True)
    ahead = {
        name: weight - step[name] * gradient
        for (name, weight), gradient in zip(leaves.items(), inner, strict=True)
    }
    value = loss(ahead, validation, pairs)
    found = torch.autograd.grad(value, (pairs, *ahead.values()))
    by_weight = {name: gradient.detach() for name, gradient in zip(ahead, found[1:], strict=True)}
    return Slopes(float(value.detach()), found[0].detach(), by_weight)


def slopes(
    order: str,
    loss: MixedLoss,
    trainer: WeightTrainer,
    pair_weights: Tensor,
    train: Tensor,
    validation: Tensor,
) -> Slopes:
    """Slopes of the order asked for at the trainer's weights, its next step being Adam's.

    Args:
        order: `first` or `second`.
        loss: Of the mixed model.
        trainer: Weights and optimizer.
        pair_weights: Of the forward pairs, `(blocks, K)`.
        train: Training bytes of the unrolled step.
        validation: Validation bytes.
    """
    if order == "first":
        return first_order(loss, trainer.weights, pair_weights, validation)
    step = {name: trainer.learning_rate * scale for name, scale in trainer.preconditioner().items()}
    return second_order(loss, trainer.weights, pair_weights, train, validation, step)


def gradient_shortfall(
    trainer: WeightTrainer, by_weight: Weights, mean: Sequence[Tensor], pairs: Sequence[Pair]
) -> Tensor:
    """Share of a step's progress on validation bytes that each pair's gradient lacks, `(blocks, K)`.

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


def one_hot_sample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One pair for each block drawn by its weight, as weights `(blocks, K)` (GDAS, arXiv 1910.04465)."""
    index = torch.multinomial(weights, 1, generator=generator)
    return torch.zeros_like(weights).scatter(1, index, 1.0)
