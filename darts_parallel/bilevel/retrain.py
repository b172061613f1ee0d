"""The DARTS protocol: a discretized plan is judged by training from scratch with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.loop import BilevelPlan
from darts_parallel.bilevel.measurements import Exchange, measure
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.time_model import TimeModel
from darts_parallel.bilevel.trainer import WeightTrainer
from darts_parallel.bilevel.transformer import Weights, plan_loss

VALIDATION_SEED = 1_000_003
"""Added to the seed for the validation batch: equal for all plans of a seed, apart from training's."""


@dataclass(frozen=True)
class Retrained:
    """Curves of one training from scratch."""

    training: tuple[tuple[int, float], ...]
    """Step and mean loss of its batch, nats."""
    validation: tuple[tuple[int, float], ...]
    """Step and loss on the fixed validation batch, nats."""

    @property
    def exchange(self) -> Exchange | None:
        """Line through the last half of the validation curve."""
        return measure(self.validation)

    @property
    def final_loss(self) -> float:
        """Validation loss at the last step: of that line, or the last measurement where there is none."""
        exchange = self.exchange
        return exchange.loss if exchange else self.validation[-1][1]


def retrain(
    plan: BilevelPlan,
    settings: BilevelSettings,
    corpus: Corpus,
    seed: int,
    on_loss: Callable[[str, int, float], None] = lambda name, step, loss: None,
) -> Retrained:
    """Train from scratch as the plan says.

    Args:
        plan: One candidate for each block, and the global batch size.
        settings: Sizes, learning rate, `retrain_steps`.
        corpus: Bytes.
        seed: Of weights and batches; plans that are compared get equal seeds.
        on_loss: Called with `train` or `validation`, step and loss.
    """
    pairs = [((c.dp, c.grad_comm_bits),) for c in plan.blocks]
    trainer = WeightTrainer(settings, plan.global_batch_size, pairs, seed)
    generator = torch.Generator().manual_seed(seed + VALIDATION_SEED)
    held_out = sample(corpus.validation, settings.validation_sequences, settings.context, generator)
    whole = [torch.ones(1)] * len(pairs)

    def loss(weights: Weights, tokens: Tensor) -> Tensor:
        return plan_loss(weights, tokens, plan.blocks)

    training, validation = [], []
    for step in range(1, settings.retrain_steps + 1):
        outcome = trainer.advance(corpus.train, loss, whole)
        training.append((step, outcome.loss))
        on_loss("train", step, outcome.loss)
        if step % settings.evaluate_every == 0 or step == settings.retrain_steps:
            with torch.no_grad():
                validation.append((step, float(plan_loss(trainer.weights, held_out, plan.blocks))))
            on_loss("validation", *validation[-1])
    return Retrained(tuple(training), tuple(validation))


RANDOM_PLANS = 4000


def fastest_plan(time: TimeModel, num_blocks: int, allowed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The plan of least predicted seconds among candidates: coordinate descent from every uniform plan.

    Args:
        time: Predicts seconds per step.
        num_blocks: Of the model.
        allowed: Candidates that a block may take.
    """
    best: tuple[float, tuple[Candidate, ...]] | None = None
    for start in allowed:
        plan, seconds = (start,) * num_blocks, float("inf")
        while True:
            trials = [(*plan[:i], c, *plan[i + 1 :]) for i in range(num_blocks) for c in allowed]
            values = time.plan_seconds(trials)
            if float(values.min()) >= seconds * (1.0 - 1e-12):
                break
            plan, seconds = trials[int(values.argmin())], float(values.min())
        if best is None or seconds < best[0]:
            best = (seconds, plan)
    assert best is not None
    return best[1]


def fastest_with_bits(time: TimeModel, num_blocks: int, bits: int) -> tuple[Candidate, ...]:
    """The fastest plan whose every all-reduce of a block runs at `bits`; groups of one rank send nothing."""

    def runs_at(candidate: Candidate) -> bool:
        tensor = candidate.tp == 1 or candidate.tp_comm_bits == bits
        return tensor and (candidate.dp == 1 or candidate.grad_comm_bits == bits)

    return fastest_plan(time, num_blocks, [c for c in time.choices.candidates if runs_at(c)])


def random_plan_of_equal_time(
    time: TimeModel, plan: Sequence[Candidate], generator: torch.Generator
) -> tuple[Candidate, ...]:
    """Of many random plans other than `plan`, the one whose predicted seconds are closest to its."""
    candidates = time.choices.candidates
    index = torch.randint(len(candidates), (RANDOM_PLANS, len(plan)), generator=generator).tolist()
    trials = [p for row in index if (p := tuple(candidates[i] for i in row)) != tuple(plan)]
    target = float(time.plan_seconds([plan])[0])
    return trials[int((time.plan_seconds(trials) / target).log().abs().argmin())]
