"""The DARTS protocol: a discretized plan is judged by training from scratch, on bytes no search saw."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.local_steps import plan_trainer
from darts_parallel.bilevel.quantize import NEAREST, Rounding
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import hard
from darts_parallel.bilevel.transformer import Weights, plan_loss

TEST_SEED = 1_000_003
"""Added to a training's seed for its test batch: equal for all plans of a seed, apart from training's."""
SMOOTHED = 3
"""Evaluations whose mean counts as the test loss of a step: one alone is as noisy as a gradient step."""
FIRST_RETRAIN_SEED = 100_000
"""Retrainings begin from other weights and batches than any search: seeds of searches lie below."""

Curve = tuple[tuple[int, float], ...]
"""Steps from 1 and losses in nats."""


@dataclass(frozen=True)
class Retrained:
    """Curves of one training from scratch."""

    training: Curve
    """Mean loss of every step's batch."""
    test: Curve
    """Loss on the fixed test batch, every `evaluate_every` steps."""

    @staticmethod
    def read(path: Path) -> "Retrained":
        """The curves of a JSON file with the fields `training` and `test`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        training, test = (tuple((step, loss) for step, loss in data[name]) for name in ("training", "test"))
        return Retrained(training, test)

    @property
    def final_loss(self) -> float:
        """Smoothed test loss at the end, nats."""
        return smoothed(self.test)[-1][1]

    def steps_to(self, target: float) -> float | None:
        """Steps after which the smoothed test loss first is at or below `target`; None where it never is."""
        return crossing(smoothed(self.test), target)


def smoothed(curve: Curve) -> Curve:
    """Running means of the last `SMOOTHED` losses, at the steps of the last of them."""
    return tuple(
        (step, sum(loss for _, loss in curve[max(i + 1 - SMOOTHED, 0) : i + 1]) / min(i + 1, SMOOTHED))
        for i, (step, _) in enumerate(curve)
    )


def crossing(curve: Curve, target: float) -> float | None:
    """The step at which a curve first lies at or below a target, on a line between logarithms of steps.

    Args:
        curve: Steps rising.
        target: Nats.
    """
    for (before, high), (after, low) in zip(curve[:1] + curve[:-1], curve, strict=True):
        if low <= target:
            share = 1.0 if high <= low else (high - target) / (high - low)
            return exp(log(before) + min(max(share, 0.0), 1.0) * (log(after) - log(before)))
    return None


def retrain(
    blocks: Sequence[Candidate],
    batch: int,
    settings: BilevelSettings,
    corpus: Corpus,
    seed: int,
    target: float | None,
    rounding: Rounding = NEAREST,
    factor: float | None = None,
    way: str = "",
) -> Retrained:
    """Train from scratch as the plan says.

    Args:
        blocks: One candidate for each block.
        batch: Global batch size.
        settings: Sizes, learning rate, `retrain_steps`.
        corpus: Bytes.
        seed: Of weights and batches; plans that are compared get equal seeds.
        target: Smoothed test loss at which to stop; None trains `retrain_steps`.
        rounding: How few bits round.
        factor: At most this many times `retrain_steps` for the target; None takes `retrain_factor`.
        way: Pipeline schedule, or local SGD.
    """
    rounding = rounding.seeded(seed)
    trainer = plan_trainer(settings, batch, seed, blocks, rounding, way)
    generator = torch.Generator().manual_seed(seed + TEST_SEED)
    held_out = sample(corpus.test, settings.validation_sequences, settings.context, generator)
    mixtures = [hard(candidate.gradient_pair) for candidate in blocks]

    def loss(weights: Weights, tokens: Tensor) -> Tensor:
        return plan_loss(weights, tokens, blocks, rounding)

    training: list[tuple[int, float]] = []
    test: list[tuple[int, float]] = []
    longest = settings.retrain_factor if factor is None else factor
    budget = settings.retrain_steps * (1.0 if target is None else longest)
    for step in range(1, int(budget) + 1):
        training.append((step, trainer.advance(corpus.train, loss, mixtures).loss))
        if step % settings.evaluate_every == 0 or step == int(budget):
            with torch.no_grad():
                test.append((step, float(loss(trainer.weights, held_out))))
            if target is not None and smoothed(tuple(test))[-1][1] <= target:
                break
    return Retrained(tuple(training), tuple(test))
