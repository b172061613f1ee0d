"""Weight steps: per-group gradients, compressed all-reduces, Adam."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.measurements import NoiseScale, squared_norms
from darts_parallel.bilevel.quantize import GradientReducer, flatten_layer, unflatten_layer
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.transformer import Weights, initial_weights
from darts_parallel.gradient.adam import EPSILON, Adam

BETAS = (0.9, 0.99)
Loss = Callable[[Weights, Tensor], Tensor]
"""Weights and tokens `(B, T + 1)` to nats."""


@dataclass(frozen=True)
class WeightStep:
    """What one weight step measured."""

    loss: float
    """Mean over the batch before the step, nats."""
    delivered: tuple[Tensor, ...]
    """Each block's mean gradient as every pair delivers it, `(K, P)`."""


@dataclass
class WeightTrainer:
    """Weights and everything that their training remembers.

    Attributes:
        settings: Learning rate, devices, sizes.
        batch: Global batch size in sequences.
        pairs: `(dp, grad_comm_bits)` of every block that its gradient may travel by.
        seed: Of the initial weights and of the training batches.
    """

    settings: BilevelSettings
    batch: int
    pairs: Sequence[tuple[tuple[int, int], ...]]
    seed: int
    step: int = 0
    weights: Weights = field(init=False)
    optimizer: Adam = field(init=False)
    reducers: list[GradientReducer] = field(init=False)
    noise: NoiseScale = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.weights = initial_weights(self.settings.shape, torch.Generator().manual_seed(self.seed))
        self.generator = torch.Generator().manual_seed(self.seed + 1)
        self.optimizer = Adam([(w, self.settings.learning_rate) for w in self.weights.values()], BETAS)
        self.reducers = [GradientReducer(pairs) for pairs in self.pairs]
        self.noise = NoiseScale(self.settings.decay)

    @property
    def learning_rate(self) -> float:
        """Of the next step: a linear rise, then constant."""
        rise = min((self.step + 1) / max(self.settings.learning_rate_warmup, 1), 1.0)
        return self.settings.learning_rate * rise

    def block_names(self, index: int) -> list[str]:
        """Names of one block's weights."""
        return [name for name in self.weights if name.startswith(f"{index}.")]

    def advance(self, text: Tensor, loss: Loss, pair_weights: Sequence[Tensor]) -> WeightStep:
        """One step on a fresh batch.

        Args:
            text: Training bytes.
            loss: Of the model as it is run now.
            pair_weights: Mixture weights of every block's pairs, each of shape `(K,)`.
        """
        groups = self.settings.num_devices
        tokens = sample(text, self.batch, self.settings.context, self.generator)
        tokens = torch.unflatten(tokens, 0, (groups, -1))
        gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0))(self.weights, tokens)
        small, large = squared_norms(gradients)
        self.noise.update(small, large, self.batch // groups, self.batch)
        delivered = []
        final = {name: gradient.mean(0) for name, gradient in gradients.items()}
        for index, (reducer, mixture) in enumerate(zip(self.reducers, pair_weights, strict=True)):
            names = self.block_names(index)
            delivered.append(reducer.reduce(flatten_layer(gradients, names)))
            final |= unflatten_layer(mixture @ delivered[-1], self.weights, names)
        self.optimizer.parameters = [(w, self.learning_rate) for w in self.weights.values()]
        for name, weight in self.weights.items():
            weight.grad = final[name]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return WeightStep(float(losses.mean()), tuple(delivered))

    def preconditioner(self) -> Weights:
        """What Adam divides gradients by, as factors: one tensor for each weight."""
        root = (1.0 - BETAS[1] ** max(self.optimizer.steps, 1)) ** 0.5
        squares = [square for _, square in self.optimizer.moments]
        return {
            name: 1.0 / (square.sqrt() / root + EPSILON)
            for name, square in zip(self.weights, squares, strict=True)
        }

    def state(self) -> dict[str, Any]:
        """Everything that the next steps depend on, copied."""
        return {
            "step": self.step,
            "weights": {name: weight.clone() for name, weight in self.weights.items()},
            "moments": [(m.clone(), s.clone()) for m, s in self.optimizer.moments],
            "optimizer_steps": self.optimizer.steps,
            "residuals": [dict(reducer.residuals) for reducer in self.reducers],
            "noise": [self.noise.square, self.noise.trace, self.noise.weight],
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.step = state["step"]
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.optimizer.moments = [(m, s) for m, s in state["moments"]]
        self.optimizer.steps = state["optimizer_steps"]
        for reducer, residuals in zip(self.reducers, state["residuals"], strict=True):
            reducer.residuals = dict(residuals)
        self.noise.square, self.noise.trace, self.noise.weight = state["noise"]
        self.generator.set_state(state["generator"])
