"""Trainings from scratch that judge plans: on other seeds, and on bytes that no search saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log

import torch

from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.loop import TrainingPhase
from darts_parallel.bilevel.settings import BilevelSettings

TEST_SEED = 1_000_003
"""Added to a training's seed for its test batch: equal for all plans of a seed, apart from training's."""
SMOOTHED = 3
"""Evaluations whose mean counts as the test loss: one alone is as noisy as a gradient step."""
FIRST_RETRAIN_SEED = 100_000
"""Retrainings begin from other weights and batches than any search: seeds of searches lie below."""


@dataclass(frozen=True)
class Retrained:
    """One training from scratch."""

    curve: tuple[tuple[float, float], ...]
    """Predicted seconds and test loss in nats, smoothed."""
    steps: int

    @property
    def final_loss(self) -> float:
        """Test loss at the end, nats."""
        return self.curve[-1][1]

    def seconds_to(self, target: float) -> float:
        """Return the predicted seconds until the loss is at or below `target`; `inf` where it never is.

        Between two test losses it lies on a line over the logarithm of seconds.
        """
        curve = self.curve
        for (before, high), (after, low) in zip((curve[0], *curve[:-1]), curve, strict=True):
            if low <= target:
                share = 1.0 if high <= low else (high - target) / (high - low)
                share = min(max(share, 0.0), 1.0)
                return exp(log(before) + share * (log(after) - log(before)))
        return inf


@dataclass(frozen=True)
class Retraining:
    """Conditions that compared trainings share: seed, bytes and the places of the test losses.

    Attributes:
        seed: Seed of weights and batches.
        interval: Predicted seconds between two test losses.
    """

    settings: BilevelSettings
    corpus: Corpus
    seed: int
    interval: float

    def train(
        self,
        phases: Sequence[TrainingPhase],
        seconds: float,
        target: float = 0.0,
    ) -> Retrained:
        """Train as a plan says, phase by phase.

        Args:
            seconds: Predicted seconds after which the training ends.
            target: Smoothed test loss at which it ends before, nats.
        """
        settings = self.settings
        trainer = WeightTrainer(settings, self.seed, measure_noise=False)
        generator = torch.Generator().manual_seed(self.seed + TEST_SEED)
        count = settings.validation_sequences
        held_out = sample(self.corpus.test, count, settings.context, generator)
        begins = {phase.from_step: phase.plan for phase in phases}
        plan = phases[0].plan
        spent = 0.0
        losses: list[float] = []
        curve = []
        while spent < seconds:
            if trainer.step in begins:
                plan = begins[trainer.step]
                trainer.batch = plan.batch
            trainer.learn_plan(trainer.next_batch(self.corpus.train), plan.blocks)
            spent += plan.seconds
            if spent >= self.interval * (len(losses) + 1) or spent >= seconds:
                with torch.no_grad():
                    loss = trainer.toy.plan_loss(trainer.weights, held_out, plan.blocks)
                losses.append(float(loss))
                recent = losses[-SMOOTHED:]
                curve.append((spent, sum(recent) / len(recent)))
                if curve[-1][1] <= target:
                    break
        return Retrained(tuple(curve), trainer.step)
