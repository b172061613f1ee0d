"""Training that does not wait: pipelines with stale weights, and replicas that average now and then.

An asynchronous 1F1B pipeline has no bubble: a stage takes the next batch before the last one's gradient is
back. Stage k of pp then computes with weights that are `pp - 1 - k` updates old, forward and backward alike,
since it stashes them (PipeDream, Narayanan et al. 2019, SOSP, section 3.3). Two buffers are enough where
gradients of several micro-batches are summed: all stages are one update behind (PipeDream-2BW, Narayanan et
al. 2021, arXiv 2006.09503). What brings the accuracy back: weights predicted as far ahead as they are old
(SpecTrain, Chen et al. 2018, arXiv 1809.02839), smaller learning rates of older stages at first (PipeMare,
Yang et al. 2021, arXiv 1910.05124). Local SGD (Stich 2019, arXiv 1805.09767) synchronises every H steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.local_steps import local_way, plan_trainer
from darts_parallel.bilevel.retraining.retrain import TEST_SEED, Retrained
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import WeightTrainer
from darts_parallel.bilevel.transformer import Weights, plan_loss

EXACT = Candidate(1, 1)


@dataclass(frozen=True)
class Staleness:
    """How old the weights are that a batch's gradient is computed with.

    Attributes:
        embedding: Updates that the embedding is behind.
        blocks: The same of every block.
        head: The same of the head.
        predicted: Whether weights are moved ahead by as many of Adam's present steps.
        discounted: Share of the training over which learning rates grow from `1 / (1 + age)` to their own.
    """

    embedding: int
    blocks: tuple[int, ...]
    head: int
    predicted: bool = False
    discounted: float = 0.0

    def of(self, name: str) -> int:
        """Updates that a weight of this name is behind."""
        if name[0].isdigit():
            return self.blocks[int(name.partition(".")[0])]
        return self.embedding if name in ("embedding", "positions") else self.head


def pipedream(pp: int, blocks: int, *, predicted: bool = False, discounted: float = 0.0) -> Staleness:
    """Weight stashing in an asynchronous 1F1B pipeline of `pp` stages with equal shares of the blocks."""
    ages = tuple(pp - 1 - index * pp // blocks for index in range(blocks))
    return Staleness(pp - 1, ages, 0, predicted, discounted)


def double_buffered(blocks: int, *, predicted: bool = False) -> Staleness:
    """Two versions of the weights: everything is one update behind."""
    return Staleness(1, (1,) * blocks, 1, predicted)


def train_stale(
    settings: BilevelSettings, corpus: Corpus, staleness: Staleness, seed: int, steps: int
) -> Retrained:
    """Train from scratch with stale weights; without staleness this is exact training.

    Args:
        settings: Sizes and learning rate.
        corpus: Bytes.
        staleness: Of every layer.
        seed: Of weights and batches.
        steps: Updates.
    """
    trainer = WeightTrainer(settings, settings.global_batch_size, seed, measure_noise=False)
    oldest = max(staleness.embedding, staleness.head, *staleness.blocks)
    history = deque([_copy(trainer.weights)], maxlen=oldest + 1)
    watch = _Watch(settings, corpus, seed, steps)
    for step in range(1, steps + 1):
        seen = {
            name: history[max(len(history) - 1 - staleness.of(name), 0)][name] for name in trainer.weights
        }
        if staleness.predicted:
            seen = _predicted(trainer, seen, staleness)
        gradients, loss = grad_and_value(watch.loss)(seen, trainer.next_batch(corpus.train))
        trainer.apply(
            gradients, _discounts(trainer, staleness, step / max(staleness.discounted * steps, 1e-9))
        )
        history.append(_copy(trainer.weights))
        watch.see(step, float(loss), trainer.weights)
    return watch.curves()


def train_local(
    settings: BilevelSettings, corpus: Corpus, replicas: int, every: int, seed: int, steps: int
) -> Retrained:
    """Train replicas on their shares of the global batch, averaging their weights every few steps.

    The loss is that of the averaged weights.

    Args:
        settings: Sizes and learning rate.
        corpus: Bytes.
        replicas: A divisor of the global batch.
        every: Steps between averages; 1 averages after every step.
        seed: Of weights and batches: batches are those of exact training.
        steps: Of every replica.
    """
    watch = _Watch(settings, corpus, seed, steps)
    replicated = (Candidate(1, replicas),) * settings.num_blocks
    trainer = plan_trainer(settings, settings.global_batch_size, seed, replicated, way=local_way(every))
    for step in range(1, steps + 1):
        loss = trainer.advance(corpus.train, watch.loss, ()).loss
        watch.see(step, loss, trainer.weights)
    return watch.curves()


class _Watch:
    """Loss of exact plans, and the test curve of a training."""

    def __init__(self, settings: BilevelSettings, corpus: Corpus, seed: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(seed + TEST_SEED)
        self.held_out = sample(corpus.test, settings.validation_sequences, settings.context, generator)
        self.plan: Sequence[Candidate] = (EXACT,) * settings.num_blocks
        self.every, self.steps = settings.evaluate_every, steps
        self.training: list[tuple[int, float]] = []
        self.test: list[tuple[int, float]] = []

    def loss(self, weights: Weights, tokens: Tensor) -> Tensor:
        """Of the model with exact collectives."""
        return plan_loss(weights, tokens, self.plan)

    def see(self, step: int, loss: float, weights: Weights) -> None:
        """Take in one step."""
        self.training.append((step, loss))
        if step % self.every == 0 or step == self.steps:
            with torch.no_grad():
                self.test.append((step, float(self.loss(weights, self.held_out))))

    def curves(self) -> Retrained:
        """All that was seen."""
        return Retrained(tuple(self.training), tuple(self.test))


def _copy(weights: Weights) -> Weights:
    return {name: weight.clone() for name, weight in weights.items()}


def _predicted(trainer: WeightTrainer, seen: Weights, staleness: Staleness) -> Weights:
    """Stale weights moved ahead along Adam's present step, as many times as they are old."""
    if not trainer.optimizer.steps:
        return seen
    return trainer.ahead(seen, staleness.of)


def _discounts(trainer: WeightTrainer, staleness: Staleness, progress: float) -> dict[str, float]:
    """Factors of the learning rates, `(1 + age)^-(1 - progress)` until progress is 1 (PipeMare)."""
    if not staleness.discounted or progress >= 1.0:
        return {}
    return {name: (1.0 + staleness.of(name)) ** (progress - 1.0) for name in trainer.weights}
