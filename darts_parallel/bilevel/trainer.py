"""Weight steps: per-group gradients, compressed all-reduces, Adam."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from darts_parallel.bilevel.data import sample
from darts_parallel.bilevel.measurements import NoiseScale, squared_norms
from darts_parallel.bilevel.quantize import (
    NEAREST,
    GradientReducer,
    Pair,
    Rounding,
    flatten_layer,
    round_blocks,
    unflatten_layer,
)
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.transformer import Weights, initial_weights
from darts_parallel.config.bilevel import ASYNCHRONOUS
from darts_parallel.cost.collectives import LOSSLESS
from darts_parallel.gradient.adam import EPSILON, Adam

BETAS = (0.9, 0.99)
FEWEST_BITS = 2
Loss = Callable[[Weights, Tensor], Tensor]
"""Weights and tokens `(B, T + 1)` to nats."""
Mixture = tuple[Sequence[Pair], Tensor]
"""Ways `(dp, grad_comm_bits)` that a block's gradient travels by, and their weights `(K,)`."""


def hard(pair: Pair) -> Mixture:
    """One way alone."""
    return (pair,), torch.ones(1)


def differentiate(loss: Loss, weights: Weights, tokens: Tensor) -> tuple[Weights, Tensor]:
    """Gradients and loss of one batch; plain autograd, a third faster than `torch.func` where both serve."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    value = loss(leaves, tokens)
    gradients = torch.autograd.grad(value, tuple(leaves.values()))
    return dict(zip(leaves, gradients, strict=True)), value.detach()


@dataclass(frozen=True)
class WeightStep:
    """What one weight step measured."""

    loss: float
    """Mean over the batch before the step, nats."""
    mean: tuple[Tensor, ...]
    """Each block's exact mean gradient, `(P,)`."""
    rounding_noise: Tensor
    """Squared norm of what rounding at the fewest bits would take from each block's step, `(blocks,)`."""


@dataclass
class WeightTrainer:
    """Weights and everything that their training remembers.

    Attributes:
        settings: Learning rate, devices, sizes.
        batch: Global batch size in sequences.
        seed: Of the initial weights and of the training batches.
        rounding: Of the gradients.
        measure_noise: Whether the gradient noise scale is measured: that needs two groups at least.
        way: Pipeline schedule. Asynchronous ones take gradients at the weights of one update before.
    """

    settings: BilevelSettings
    batch: int
    seed: int
    rounding: Rounding = NEAREST
    measure_noise: bool = True
    way: str = ""
    step: int = 0
    before: Weights = field(init=False, default_factory=dict)
    weights: Weights = field(init=False)
    optimizer: Adam = field(init=False)
    reducers: list[GradientReducer] = field(init=False)
    noise: NoiseScale = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.weights = initial_weights(self.settings.shape, torch.Generator().manual_seed(self.seed))
        self.generator = torch.Generator().manual_seed(self.seed + 1)
        self.optimizer = Adam([(w, self.settings.learning_rate) for w in self.weights.values()], BETAS)
        self.reducers = [GradientReducer(self.rounding) for _ in range(self.settings.num_blocks)]
        self.noise = NoiseScale(self.settings.decay)

    @property
    def learning_rate(self) -> float:
        """Of the next step: a linear rise, then constant."""
        rise = min((self.step + 1) / max(self.settings.learning_rate_warmup, 1), 1.0)
        return self.settings.learning_rate * rise

    def block_names(self, index: int) -> list[str]:
        """Names of one block's weights."""
        return [name for name in self.weights if name.startswith(f"{index}.")]

    def next_batch(self, text: Tensor) -> Tensor:
        """Fresh tokens of one step, shape `(B, T + 1)`."""
        return sample(text, self.batch, self.settings.context, self.generator)

    def advance(self, text: Tensor, loss: Loss, mixtures: Sequence[Mixture]) -> WeightStep:
        """One step on a fresh batch.

        Args:
            text: Training bytes.
            loss: Of the model as it is run now.
            mixtures: How every block's gradient travels.
        """
        return self.learn(self.next_batch(text), loss, mixtures)

    def learn(self, tokens: Tensor, loss: Loss, mixtures: Sequence[Mixture]) -> WeightStep:
        """One step on given tokens; arguments as `advance`."""
        lossy = [dp for pairs, _ in mixtures for dp, bits in pairs if bits < LOSSLESS]
        groups = lcm(*lossy, 2 if self.measure_noise else 1)
        gradients, losses = self._differentiate(torch.unflatten(tokens, 0, (groups, -1)), loss)
        if groups > 1:
            small, large = squared_norms(gradients)
            self.noise.update(small, large, len(tokens) // groups, len(tokens))
        mean, noise = [], []
        final = {name: gradient.mean(0) for name, gradient in gradients.items()}
        for index, (reducer, (pairs, mixture)) in enumerate(zip(self.reducers, mixtures, strict=True)):
            names = self.block_names(index)
            flat = flatten_layer(gradients, names)
            delivered = reducer.reduce(flat, pairs)
            mean.append(flat.mean(0))
            noise.append(self._rounding_noise(mean[-1], names))
            final |= unflatten_layer(mixture @ delivered, self.weights, names)
        self.apply(final)
        return WeightStep(float(losses.mean()), tuple(mean), torch.stack(noise))

    def _differentiate(self, tokens: Tensor, loss: Loss) -> tuple[Weights, Tensor]:
        """Gradients and losses of every group of tokens `(G, B / G, T + 1)`."""
        seen = self._seen()
        if len(tokens) == 1 or self.rounding.stochastic:  # vmap would draw one noise for all groups
            results = [differentiate(loss, seen, own) for own in tokens]
            names = self.weights
            return (
                {name: torch.stack([gradient[name] for gradient, _ in results]) for name in names},
                torch.stack([value for _, value in results]),
            )
        found: tuple[Weights, Tensor] = vmap(grad_and_value(loss), in_dims=(None, 0))(seen, tokens)
        return found

    def _rounding_noise(self, mean: Tensor, names: Sequence[str]) -> Tensor:
        """Energy of what the fewest bits take from the mean gradient, in units of Adam's own step."""
        if not self.measure_noise or not self.optimizer.steps:
            return torch.ones(())
        scale = self.preconditioner()
        factors = torch.cat([scale[name].flatten() for name in names])
        taken = mean - round_blocks(mean.unsqueeze(0), FEWEST_BITS)[0]
        return (taken * factors).square().sum()

    def apply(self, gradients: Weights, factors: Mapping[str, float] | None = None) -> None:
        """One step of Adam along mean gradients.

        Args:
            gradients: By name.
            factors: Of the learning rate of some weights; 1 for the others.
        """
        known, rate = factors or {}, self.learning_rate
        self.optimizer.parameters = [(w, rate * known.get(name, 1.0)) for name, w in self.weights.items()]
        if self.way in ASYNCHRONOUS:
            self.before = {name: weight.clone() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _seen(self) -> Weights:
        """The weights that gradients are taken at: of one update before, moved ahead where predicted."""
        if not self.before:
            return self.weights
        return self.ahead(self.before) if self.way.endswith("predicted") else self.before

    def ahead(self, weights: Weights, steps: Callable[[str], int] = lambda name: 1) -> Weights:
        """Weights moved on by some of Adam's present steps (SpecTrain, Chen et al. 2018, arXiv 1809.02839).

        Args:
            weights: Old ones.
            steps: Of every weight, by name.
        """
        scale = self.preconditioner()
        rate = self.learning_rate / (1.0 - BETAS[0] ** max(self.optimizer.steps, 1))
        means = dict(zip(self.weights, (mean for mean, _ in self.optimizer.moments), strict=True))
        return {
            name: weight - steps(name) * rate * means[name] * scale[name] for name, weight in weights.items()
        }

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
