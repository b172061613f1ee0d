"""Weight steps (per-group gradients, compressed all-reduces, Adam), and DARTS's slopes of a mixture's loss.

First order takes the model's weights as given; second order differentiates through one weight step (Liu,
Simonyan, Yang 2019, arXiv 1806.09055, section 2.3). Their finite difference of twice 0.01 sees the jumps of
rounding, not its slope; double backward through the straight-through estimator has no such step size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

import torch
from torch import Tensor

from darts_parallel.bilevel._measurements import NoiseScale, squared_norms
from darts_parallel.bilevel._quantize import (
    GradientReducer,
    Pair,
    flatten_layer,
    round_blocks,
    unflatten_layer,
)
from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.space import Candidate
from darts_parallel.bilevel.transformer import Toy, Weights
from darts_parallel.config import LOSSLESS
from darts_parallel.gradient import EPSILON, Adam

BETAS = (0.9, 0.99)
Loss = Callable[[Weights, Tensor], Tensor]
"""Weights and tokens `(B, T + 1)` to nats."""
Mixture = tuple[Sequence[Pair], Tensor]
"""Pairs `(dp, grad_comm_bits)` that a block's gradient travels by, and their weights `(K,)`."""


def differentiate(
    loss: Loss,
    weights: Weights,
    tokens: Tensor,
) -> tuple[Weights, Tensor]:
    """Return gradients and loss of one batch."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    value = loss(leaves, tokens)
    gradients = torch.autograd.grad(value, tuple(leaves.values()))
    return dict(zip(leaves, gradients, strict=True)), value.detach()


@dataclass(frozen=True)
class WeightStep:
    """Measurements of one weight step."""

    loss: float
    """Mean loss of the batch before the step, nats."""
    mean: tuple[Tensor, ...]
    """Each block's exact mean gradient, `(P,)`."""


class WeightTrainer:
    """Weights and everything that their training remembers.

    Attributes:
        batch: Global batch size in sequences.
        frozen: Whether steps measure everything and leave the weights where they are.

    Args:
        settings: Learning rate, devices, sizes, and the global batch size at the beginning.
        seed: Seed of the initial weights and of the training batches.
        measure_noise: Whether the gradient noise scale is measured: that needs two groups at least.
    """

    def __init__(
        self,
        settings: BilevelSettings,
        seed: int,
        measure_noise: bool = True,
    ) -> None:
        self.settings = settings
        self.measure_noise = measure_noise
        self.batch = settings.global_batch_size
        self.frozen = False
        self.step = 0
        fused = settings.order != "second"
        self.toy = Toy(settings.model, settings.block_size, fused)
        self.weights = self.toy.initial_weights(torch.Generator().manual_seed(seed))
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.optimizer = Adam([(weight, 1.0) for weight in self.weights.values()], BETAS)
        self.reducers = [GradientReducer(settings.block_size) for _ in range(settings.num_blocks)]
        self.noise = NoiseScale(settings.decay)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: a linear rise, then constant."""
        if self.frozen:
            return 0.0
        rise = min((self.step + 1) / max(self.settings.learning_rate_warmup, 1), 1.0)
        return self.settings.learning_rate * rise

    def block_names(self, index: int) -> list[str]:
        """List the names of one block's weights."""
        return [name for name in self.weights if name.startswith(f"blocks.{index}.")]

    def next_batch(self, text: Tensor) -> Tensor:
        """Draw fresh tokens of one step, shape `(B, T + 1)`."""
        return sample(text, self.batch, self.settings.context, self.generator)

    def learn_plan(
        self,
        tokens: Tensor,
        plan: Sequence[Candidate],
    ) -> WeightStep:
        """Make one step on tokens `(B, T + 1)` as a plan says, one candidate for each block."""
        loss = partial(self.toy.plan_loss, plan=plan)
        one = torch.ones(1)
        return self.learn(tokens, loss, [((candidate.gradient_pair,), one) for candidate in plan])

    def learn(
        self,
        tokens: Tensor,
        loss: Loss,
        mixtures: Sequence[Mixture],
    ) -> WeightStep:
        """Make one step.

        Args:
            tokens: Batch, shape `(B, T + 1)`.
        """
        weights = self.weights
        lossy = [dp for pairs, _ in mixtures for dp, bits in pairs if bits < LOSSLESS]
        groups = lcm(*lossy, 2 if self.measure_noise else 1)
        found = [differentiate(loss, weights, own) for own in tokens.chunk(groups)]
        gradients = {name: torch.stack([own[name] for own, _ in found]) for name in weights}
        if groups > 1:
            small, large = squared_norms(gradients)
            self.noise.update(small, large, len(tokens) // groups, len(tokens))
        mean = []
        final = {name: gradient.mean(0) for name, gradient in gradients.items()}
        for index, (reducer, (pairs, mixture)) in enumerate(
            zip(self.reducers, mixtures, strict=True)
        ):
            names = self.block_names(index)
            flat = flatten_layer(gradients, names)
            delivered = reducer.reduce(flat, pairs)
            mean.append(flat.mean(0))
            final |= unflatten_layer(mixture @ delivered, weights, names)
        for name, weight in weights.items():
            weight.grad = final[name]
        self.optimizer.step(self.learning_rate)
        self.optimizer.zero_grad()
        self.step += 1
        losses = torch.stack([value for _, value in found])
        return WeightStep(float(losses.mean()), tuple(mean))

    def preconditioner(self) -> Weights:
        """Return the factors by which Adam scales gradients: one tensor for each weight."""
        root = (1.0 - BETAS[1] ** max(self.optimizer.steps, 1)) ** 0.5
        squares = zip(self.weights, (square for _, square in self.optimizer.moments), strict=True)
        return {name: 1.0 / (square.sqrt() / root + EPSILON) for name, square in squares}


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
        inner = torch.autograd.grad(
            loss(leaves, train, pairs), tuple(leaves.values()), create_graph=True
        )
        pairs_of = zip(leaves.items(), inner, strict=True)
        ahead = {name: weight - step[name] * gradient for (name, weight), gradient in pairs_of}
    value = loss(ahead, validation, pairs)
    by_pair, *by_weight = torch.autograd.grad(value, (pairs, *ahead.values()))
    return Slopes(float(value.detach()), by_pair, dict(zip(ahead, by_weight, strict=True)))


def gradient_shortfall(
    trainer: WeightTrainer,
    by_weight: Weights,
    mean: Sequence[Tensor],
    pairs: Sequence[Pair],
) -> Tensor:
    """Return the share of a step's progress on validation bytes that each pair lacks, `(blocks, K)`.

    A step along a gradient lowers the validation loss by the inner product of the two. What error feedback
    delivers later is not seen: the figure overrates what compressed gradients cost.

    Args:
        mean: Exact mean gradients by block, `(P,)`.
        pairs: K data-parallel degrees and bits.
    """
    scale = trainer.preconditioner()
    stepped = {name: (scale[name] * gradient).unsqueeze(0) for name, gradient in by_weight.items()}
    rows = []
    total = 0.0
    for index, exact in enumerate(mean):
        direction = flatten_layer(stepped, trainer.block_names(index)).squeeze(0)
        sent = {bits: round_blocks(exact.unsqueeze(0), bits)[0] for _, bits in pairs}
        rows.append(torch.stack([(exact - sent[bits]) @ direction for _, bits in pairs]))
        total += float(exact @ direction)
    lacking = torch.stack(rows).double()
    return lacking / total if total > 0.0 else torch.zeros_like(lacking)
