"""Local SGD: replicas that train alone on their share of the batch and average their weights now and then.

Stich 2019 (arXiv 1805.09767). Adam's moments stay with their replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.quantize import NEAREST, Rounding
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import BETAS, Loss, Mixture, WeightStep, WeightTrainer, differentiate
from darts_parallel.bilevel.transformer import Weights
from darts_parallel.gradient.adam import Adam

LOCAL = "local_"
"""A way of training begins so where replicas average every so many steps, e.g. `local_4`."""


def local_way(every: int) -> str:
    """Name the way of training that averages every `every` steps."""
    return f"{LOCAL}{every}"


@dataclass
class LocalTrainer:
    """Replicas side by side; equal batches as `WeightTrainer` of the same seed.

    Attributes:
        single: Draws batches and knows the learning rate.
        replicas: A divisor of the global batch.
        every: Steps between averages; 1 averages after every step.
        stacked: Weights with a leading axis of replicas.
    """

    single: WeightTrainer
    replicas: int
    every: int
    stacked: Weights = field(init=False)
    optimizer: Adam = field(init=False)

    def __post_init__(self) -> None:
        copies = self.replicas
        self.stacked = {n: w.expand(copies, *w.shape).clone() for n, w in self.single.weights.items()}
        self.optimizer = Adam([(w, 0.0) for w in self.stacked.values()], BETAS)

    @property
    def weights(self) -> Weights:
        """Mean of the replicas: what is judged."""
        return {name: weight.mean(0) for name, weight in self.stacked.items()}

    def advance(self, text: Tensor, loss: Loss, mixtures: Sequence[Mixture]) -> WeightStep:
        """One step of every replica on a fresh batch.

        Args:
            text: Training bytes.
            loss: Of the model as it is run now.
            mixtures: Not read: nothing but weights travels, and these are whole.
        """
        tokens = torch.unflatten(self.single.next_batch(text), 0, (self.replicas, -1))
        gradients, losses = self._differentiate(tokens, loss)
        rate = self.single.learning_rate
        self.optimizer.parameters = [(w, rate) for w in self.stacked.values()]
        for name, weight in self.stacked.items():
            weight.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.single.step += 1
        if self.single.step % self.every == 0:
            for weight in self.stacked.values():
                weight.copy_(weight.mean(0, keepdim=True).expand_as(weight))
        return WeightStep(float(losses.mean()), (), torch.zeros(0))

    def _differentiate(self, tokens: Tensor, loss: Loss) -> tuple[Weights, Tensor]:
        """Gradients and losses of every replica on its tokens `(R, B / R, T + 1)`."""
        if self.replicas > 1 and not self.single.rounding.stochastic:
            found: tuple[Weights, Tensor] = vmap(grad_and_value(loss))(self.stacked, tokens)
            return found
        # one replica is exact training to the last bit; vmap would draw one noise for all
        alone = [
            differentiate(loss, {name: weight[index] for name, weight in self.stacked.items()}, own)
            for index, own in enumerate(tokens)
        ]
        stacked = {name: torch.stack([gradients[name] for gradients, _ in alone]) for name in self.stacked}
        return stacked, torch.stack([value for _, value in alone])


def plan_trainer(
    settings: BilevelSettings,
    batch: int,
    seed: int,
    plan: Sequence[Candidate],
    rounding: Rounding = NEAREST,
    way: str = "",
) -> WeightTrainer | LocalTrainer:
    """What trains a plan in its way, from fresh weights.

    Args:
        settings: Sizes and learning rate.
        batch: Global batch size in sequences.
        seed: Of weights and batches.
        plan: One candidate for each block; replicas of local SGD are their data-parallel ranks.
        rounding: How few bits round.
        way: Pipeline schedule, or local SGD.
    """
    if way.startswith(LOCAL):
        single = WeightTrainer(settings, batch, seed, rounding, measure_noise=False)
        return LocalTrainer(single, plan[0].dp, int(way.removeprefix(LOCAL)))
    return WeightTrainer(settings, batch, seed, rounding, measure_noise=False, way=way)
