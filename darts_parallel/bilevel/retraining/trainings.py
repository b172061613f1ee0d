"""Trainings from scratch that are kept in a folder: equal ones run once, known ones not at all."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.local_steps import LOCAL
from darts_parallel.bilevel.retraining.retrain import Retrained, retrain
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.plan.file import write_json

RETRAIN_KEYS = (
    "shape", "retrain_steps", "retrain_factor", "learning_rate", "learning_rate_warmup",
    "validation_sequences", "evaluate_every", "rounding", "hadamard", "block", "eight_bits",
)  # fmt: skip
"""What a retrained plan depends on besides itself, its target and the seed."""
SYNCHRONOUS = "1f1b"
EXACT = Candidate(1, 1)
"""A block that trains as a plan without lossy collectives does, whatever its degrees."""


@dataclass(frozen=True)
class Training:
    """One training that is wanted.

    Attributes:
        blocks: One candidate for each block.
        batch: Global batch size.
        seed: Of weights and batches.
        target: Smoothed test loss at which to stop; None trains `retrain_steps`.
        factor: At most this many times `retrain_steps` for the target; None takes the setting.
        way: Pipeline schedule, or local SGD; training feels all but the one that waits.
    """

    blocks: tuple[Candidate, ...]
    batch: int
    seed: int
    target: float | None
    factor: float | None = None
    way: str = SYNCHRONOUS


@dataclass(frozen=True)
class Trainings:
    """Runs trainings, as many at once as there are processes, and keeps their curves.

    Attributes:
        folder: One JSON file a training.
        corpus: Bytes.
        jobs: Runs trainings side by side.
    """

    folder: Path
    corpus: Corpus
    jobs: Jobs

    def references(self, seeds: Sequence[int], settings: BilevelSettings) -> list[Retrained]:
        """Exact training at the problem's batch size on every seed: its final loss is the target."""
        plan = (EXACT,) * settings.num_blocks
        return self.run([Training(plan, settings.global_batch_size, seed, None) for seed in seeds], settings)

    def run(
        self,
        wanted: Sequence[Training],
        settings: BilevelSettings,
        on_done: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Retrained]:
        """Curves of all trainings in order.

        Args:
            wanted: Trainings.
            settings: What they depend on besides, see `RETRAIN_KEYS`.
            on_done: Called with the number of trainings that have run and of those that must.
        """
        own = [_as_reference(training, settings) for training in wanted]
        keys = [_key(training, settings) for training in own]
        paths = [self.folder / f"{_digest(key)}.json" for key in keys]
        missing = {
            path: (training, key)
            for path, training, key in zip(paths, own, keys, strict=True)
            if not path.exists()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = list(missing.items())

        def keep(done: int, curves: Retrained) -> None:
            path, (_, key) = waiting[done - 1]
            write_json(path, key | {"training": curves.training, "test": curves.test})
            on_done(done, len(waiting))

        arguments = [
            (t.blocks, t.batch, settings, self.corpus, t.seed, t.target, settings.rounds, t.factor, t.way)
            for t, _ in missing.values()
        ]
        self.jobs.map(retrain, arguments, keep)
        return [Retrained.read(path) for path in paths]


def _as_reference(training: Training, settings: BilevelSettings) -> Training:
    """The same training; one without lossy collectives is its seed's reference, whose end is the target."""
    exact = all(candidate.lossless for candidate in training.blocks)
    if not exact or training.way != SYNCHRONOUS or training.batch != settings.global_batch_size:
        return training
    return Training((EXACT,) * settings.num_blocks, training.batch, training.seed, None)


def _key(training: Training, settings: BilevelSettings) -> dict[str, Any]:
    values = asdict(settings)
    felt = [candidate.felt() for candidate in training.blocks]
    local = training.way.startswith(LOCAL)
    factor = settings.retrain_factor if training.factor is None else training.factor
    return {name: values[name] for name in RETRAIN_KEYS} | {
        "seed": training.seed, "plan": felt, "batch": training.batch, "target": training.target,
        "way": training.way, "replicas": training.blocks[0].dp if local else 1,
        "retrain_factor": None if training.target is None else factor,
    }  # fmt: skip


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
