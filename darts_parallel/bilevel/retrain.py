"""The DARTS protocol: a plan is judged by training from scratch, on bytes no search saw.

Trainings are stored in a folder: equal ones run once, stored ones not at all.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import EXACT, Candidate
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.transformer import plan_loss
from darts_parallel.plans import write_json

TEST_SEED = 1_000_003
"""Added to a training's seed for its test batch: equal for all plans of a seed, apart from training's."""
SMOOTHED = 3
"""Evaluations whose mean counts as the test loss of a step: one alone is as noisy as a gradient step."""
FIRST_RETRAIN_SEED = 100_000
"""Retrainings begin from other weights and batches than any search: seeds of searches lie below."""
RETRAIN_KEYS = (
    "shape",
    "retrain_steps",
    "learning_rate",
    "learning_rate_warmup",
    "validation_sequences",
    "evaluate_every",
    "block_size",
)
"""Settings that a training depends on."""

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
        """Read the curves of a JSON file with the fields `training` and `test`."""
        data = json.loads(path.read_text(encoding="utf-8"))
        training = tuple((step, loss) for step, loss in data["training"])
        test = tuple((step, loss) for step, loss in data["test"])
        return Retrained(training, test)

    @property
    def final_loss(self) -> float:
        """Smoothed test loss at the end, nats."""
        return smoothed(self.test)[-1][1]

    def steps_to(self, target: float) -> float | None:
        """Return the steps until the smoothed test loss is at or below `target`; None where it never is."""
        return crossing(smoothed(self.test), target)


def smoothed(curve: Curve) -> Curve:
    """Return running means of the last `SMOOTHED` losses, at the steps of the last of them."""
    means = []
    for place, (step, _) in enumerate(curve):
        run = [loss for _, loss in curve[max(place + 1 - SMOOTHED, 0) : place + 1]]
        means.append((step, sum(run) / len(run)))
    return tuple(means)


def crossing(curve: Curve, target: float) -> float | None:
    """Find the step where a curve first lies at or below a target, on lines between logarithms of steps."""
    for (before, high), (after, low) in zip(curve[:1] + curve[:-1], curve, strict=True):
        if low <= target:
            share = 1.0 if high <= low else (high - target) / (high - low)
            share = min(max(share, 0.0), 1.0)
            return exp(log(before) + share * (log(after) - log(before)))
    return None


@dataclass(frozen=True)
class Training:
    """One training that is wanted.

    Attributes:
        blocks: One candidate for each block.
        batch: Global batch size.
        seed: Seed of weights and batches; plans that are compared get equal ones.
        target: Smoothed test loss at which to stop, nats; None trains `retrain_steps`.
        factor: Largest number of steps on the way to the target, as a multiple of `retrain_steps`; None takes
            `retrain_factor`.
    """

    blocks: tuple[Candidate, ...]
    batch: int
    seed: int
    target: float | None
    factor: float | None = None

    def most_steps(self, settings: BilevelSettings) -> int:
        """Return the largest number of weight steps."""
        factor = settings.retrain_factor if self.factor is None else self.factor
        return int(settings.retrain_steps * (1.0 if self.target is None else factor))

    def canonicalized(self, settings: BilevelSettings) -> "Training":
        """Take its seed's reference, whose end is the target, for a training without lossy collectives."""
        lossless = all(block.lossless for block in self.blocks)
        if self.batch != settings.global_batch_size or not lossless:
            return self
        return Training((EXACT,) * settings.num_blocks, self.batch, self.seed, None)

    def key(self, settings: BilevelSettings) -> dict[str, Any]:
        """Return everything that the curves depend on."""
        values = asdict(settings)
        key = {name: values[name] for name in RETRAIN_KEYS}
        key |= {"seed": self.seed, "batch": self.batch, "target": self.target}
        key["plan"] = [block.training_key() for block in self.blocks]
        key["most_steps"] = self.most_steps(settings)
        return key


def retrain(
    training: Training,
    settings: BilevelSettings,
    corpus: Corpus,
) -> Retrained:
    """Train from scratch as a plan says.

    Args:
        corpus: Bytes.
    """
    blocks = training.blocks
    target = training.target
    trainer = WeightTrainer(settings, training.batch, training.seed, measure_noise=False)
    generator = torch.Generator().manual_seed(training.seed + TEST_SEED)
    held_out = sample(corpus.test, settings.validation_sequences, settings.context, generator)
    curve: list[tuple[int, float]] = []
    test: list[tuple[int, float]] = []
    last = training.most_steps(settings)
    for step in range(1, last + 1):
        tokens = trainer.next_batch(corpus.train)
        curve.append((step, trainer.learn_plan(tokens, blocks).loss))
        if step % settings.evaluate_every == 0 or step == last:
            with torch.no_grad():
                loss = plan_loss(trainer.weights, held_out, blocks, settings.block_size)
            test.append((step, float(loss)))
            if target is not None and smoothed(tuple(test))[-1][1] <= target:
                break
    return Retrained(tuple(curve), tuple(test))


@dataclass(frozen=True)
class Trainings:
    """Runs trainings, as many at once as there are processes, and stores their curves.

    Attributes:
        folder: One JSON file a training.
        corpus: Bytes.
        jobs: Runs trainings side by side.
    """

    folder: Path
    corpus: Corpus
    jobs: Jobs

    def references(self, seeds: Sequence[int], settings: BilevelSettings) -> list[Retrained]:
        """Train exactly at the problem's batch size on every seed: the final loss is the target."""
        plan = (EXACT,) * settings.num_blocks
        batch = settings.global_batch_size
        return self.run([Training(plan, batch, seed, None) for seed in seeds], settings)

    def run(
        self,
        wanted: Sequence[Training],
        settings: BilevelSettings,
        on_done: Callable[[int, int], None] | None = None,
    ) -> list[Retrained]:
        """Return the curves of all trainings in order.

        Args:
            on_done: Called with the number of trainings that have run and of those that must.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = []
        missing: dict[Path, Training] = {}
        for training in wanted:
            training = training.canonicalized(settings)
            path = self.folder / f"{digest(training.key(settings))}.json"
            paths.append(path)
            if not path.exists():
                missing[path] = training
        arguments = [(training, settings, self.corpus) for training in missing.values()]
        curves = self.jobs.map(retrain, arguments)
        for done, (path, training) in enumerate(missing.items(), 1):
            write_json(path, training.key(settings) | asdict(next(curves)))
            if on_done is not None:
                on_done(done, len(missing))
        return [Retrained.read(path) for path in paths]


def digest(key: dict[str, Any]) -> str:
    """Name a JSON value in 16 characters."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
