"""Many initial points trained as one batch, filtered after the first steep drop of the loss.

Before that drop every start still has the loss of byte frequencies, and its ranking says nothing
about what comes later; so the filter waits until the mean loss has fallen clearly below the unigram
entropy. Starts with low loss and large gradient stay; the places of the others are taken by copies
of them with a little noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import sample, unigram_entropy
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import BETAS
from darts_parallel.bilevel.transformer import Weights, initial_weights, plan_loss
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.restarts import rank_starts, resample_sources

DROP = 0.2
"""Nats below the unigram entropy at which the first steep drop counts as over."""
SPREAD = 0.02
"""Noise of a resampled start, as a share of each weight tensor's standard deviation."""
RECENT = 0.9
"""Decay of the loss average that starts are ranked by."""


@dataclass
class ParallelStarts:
    """N trainings side by side, each with batches of its own.

    Attributes:
        settings: Sizes and learning rate.
        plan: How the blocks run.
        weights: Every tensor with a leading axis of N starts.
        losses: Moving average of each start's training loss, nats, shape `(N,)`.
        gradient_norms: Of the last step, `(N,)`.
        filtered_at: Step of the filter; None before it.
    """

    settings: BilevelSettings
    plan: tuple[Candidate, ...]
    weights: Weights
    optimizer: Adam
    generator: torch.Generator
    losses: Tensor
    gradient_norms: Tensor
    step: int = 0
    filtered_at: int | None = None

    @staticmethod
    def initial(
        settings: BilevelSettings, plan: tuple[Candidate, ...], count: int, seed: int
    ) -> "ParallelStarts":
        """`count` independent random starts; the first has the weights of a single run of this seed."""
        drawn = [
            initial_weights(settings.shape, torch.Generator().manual_seed(seed + i)) for i in range(count)
        ]
        weights = {name: torch.stack([w[name] for w in drawn]) for name in drawn[0]}
        optimizer = Adam([(w, settings.learning_rate) for w in weights.values()], BETAS)
        generator = torch.Generator().manual_seed(seed + 1)
        return ParallelStarts(
            settings, plan, weights, optimizer, generator, torch.full((count,), torch.nan), torch.zeros(count)
        )

    def advance(self, text: Tensor) -> None:
        """One step of every start."""
        count, settings = len(self.losses), self.settings
        tokens = sample(text, count * settings.global_batch_size, settings.context, self.generator)
        tokens = torch.unflatten(tokens, 0, (count, -1))
        gradients, losses = vmap(grad_and_value(self._loss))(self.weights, tokens)
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        self.gradient_norms = torch.stack(squares).sum(0).sqrt()
        average = RECENT * self.losses + (1.0 - RECENT) * losses
        self.losses = torch.where(self.losses.isnan(), losses, average)
        rise = min((self.step + 1) / max(settings.learning_rate_warmup, 1), 1.0)
        self.optimizer.parameters = [(w, rise * settings.learning_rate) for w in self.weights.values()]
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def over_the_drop(self, text: Tensor) -> bool:
        """Whether the mean loss has fallen clearly below the unigram entropy of `text`."""
        return float(self.losses.mean()) <= unigram_entropy(text) - DROP

    def filter(self, text: Tensor, survivors: int) -> bool:
        """Resample around the best once the first steep drop is over; returns whether it did so now.

        Args:
            text: Training bytes, for the unigram entropy.
            survivors: Starts that stay, at least one.
        """
        if self.filtered_at is not None or not self.over_the_drop(text):
            return False
        source = resample_sources(rank_starts(self.losses, self.gradient_norms), survivors)
        copies = torch.arange(len(source)) >= survivors
        for weight in self.weights.values():
            kept = weight[source]
            scale = SPREAD * kept.flatten(1).std(1) * copies
            noise = torch.randn(kept.shape, generator=self.generator)
            weight.copy_(kept + noise * scale.view(-1, *[1] * (kept.dim() - 1)))
        self.optimizer.moments = [(mean[source], square[source]) for mean, square in self.optimizer.moments]
        self.losses, self.gradient_norms = self.losses[source], self.gradient_norms[source]
        self.filtered_at = self.step
        return True

    def keep_best(self) -> None:
        """Go on with the start of the lowest average loss alone."""
        best = self.losses.argmin().unsqueeze(0)
        self.weights = {name: weight[best] for name, weight in self.weights.items()}
        moments = [(mean[best], square[best]) for mean, square in self.optimizer.moments]
        steps = self.optimizer.steps
        self.optimizer = Adam([(w, self.settings.learning_rate) for w in self.weights.values()], BETAS, steps)
        self.optimizer.moments = moments
        self.losses, self.gradient_norms = self.losses[best], self.gradient_norms[best]

    def evaluate(self, tokens: Tensor) -> Tensor:
        """Loss of every start on the same tokens, nats, shape `(N,)`."""
        with torch.no_grad():
            losses: Tensor = vmap(self._loss, in_dims=(0, None))(self.weights, tokens)
        return losses

    def _loss(self, weights: Weights, tokens: Tensor) -> Tensor:
        return plan_loss(weights, tokens, self.plan)
