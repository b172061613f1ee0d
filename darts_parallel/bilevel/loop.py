"""The bilevel search: weight steps on training bytes, logit steps on validation bytes."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate, candidate_set
from darts_parallel.bilevel.checkpoint import CheckpointError, load_latest, save_checkpoint
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.logits import Logits, Progress, UpperGradient, UpperLevel
from darts_parallel.bilevel.measurements import measure
from darts_parallel.bilevel.rollout import Pair, gradient_costs, sum_costs
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.time_model import build_time_model
from darts_parallel.bilevel.trainer import WeightStep, WeightTrainer
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.relaxation import geometric
from darts_parallel.problem.problem import Problem

LOGIT_BETAS = (0.5, 0.999)
RETRAIN_ONLY = ("retrain_steps", "validation_sequences", "evaluate_every", "seeds", "arms")
"""Settings that the search does not read: a checkpoint stays good when they change."""


@dataclass(frozen=True)
class BilevelPlan:
    """A discretized plan."""

    blocks: tuple[Candidate, ...]
    global_batch_size: int


@dataclass(frozen=True)
class BilevelRecord:
    """One weight step, and the logit step after it where there was one."""

    step: int
    training_loss: float
    noise_sequences: float | None
    nats_per_efold: float | None
    entropy: float
    """Mean over blocks of the entropy of the candidates' weights, nats."""
    weights: Tensor
    """Of the candidates, `(blocks, C)`."""
    batch_weights: Tensor
    """Of the global batch sizes, `(batches,)`."""
    temperature: float
    hard_seconds: float
    """Predicted seconds per step of the plan that the logits stand for."""
    trial_costs: Tensor | None
    """Measured log steps that each gradient pair costs, `(K,)`."""
    sum_costs: Tensor | None
    """The same of each pair of a tensor-parallel degree and bits of its sums."""
    upper: UpperGradient | None


def at_batch(problem: Problem, global_batch_size: int) -> Problem:
    """The same problem at another global batch size."""
    training = replace(problem.training, global_batch_size=global_batch_size)
    return Problem.from_config(replace(problem.config, training=training))


def fingerprint(problem: Problem) -> str:
    """What tells problems apart that a checkpoint must not be carried between."""
    parts = asdict(problem.config)
    text = json.dumps(
        {key: parts[key] for key in ("model", "cluster", "training", "space", "cost")}, sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BilevelSearch:
    """The search, as a state that advances step by step and can be written down between any two.

    Args:
        settings: Everything that can be chosen; `settings.seed` gives all random numbers.
        problem: Prices the seconds of a step.
        corpus: Bytes.
    """

    def __init__(self, settings: BilevelSettings, problem: Problem, corpus: Corpus) -> None:
        self.settings, self.problem, self.corpus = settings, problem, corpus
        self.choices = candidate_set(problem)
        times = [build_time_model(at_batch(problem, batch), self.choices) for batch in settings.batches]
        self.upper = UpperLevel(
            self.choices, times, settings.batches, settings.mix, settings.order,
            Progress(settings.decay), Progress(settings.decay),
        )  # fmt: skip
        pairs = [self.choices.gradient_pairs] * settings.num_blocks
        self.trainer = WeightTrainer(settings, settings.global_batch_size, pairs, settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed + 2)
        self.logits = Logits.initial(settings.num_blocks, self.choices, len(settings.batches), self.generator)
        self.optimizer = Adam(
            [(part, settings.logit_learning_rate) for part in self.logits.tensors()], LOGIT_BETAS
        )
        self.curve: list[tuple[int, float]] = []
        self.trial_at = 0

    @property
    def temperature(self) -> float:
        """Softmax temperature of the next step."""
        start, end = self.settings.temperature
        return geometric(start, end, self.trainer.step, self.settings.num_steps)

    def candidate_weights(self) -> Tensor:
        """Softmax weights of the candidates, `(blocks, C)`."""
        return torch.softmax(self.logits.choices.detach() / self.temperature, -1)

    def plan(self) -> BilevelPlan:
        """The plan that the logits stand for now."""
        batch = self.settings.batches[int(self.logits.batch.argmax())]
        return BilevelPlan(self.choices.hard(self.candidate_weights()), batch)

    def step(self) -> BilevelRecord:
        """One weight step, and a logit step where one is due and the exchange rate is known."""
        settings, weights = self.settings, self.candidate_weights()
        outcome = self.trainer.advance(
            self.corpus.train, self.upper.loss(weights), list(weights @ self.choices.to_gradient)
        )
        self.curve.append((self.trainer.step, outcome.loss))
        exchange = measure(self.curve)
        due = self.trainer.step > settings.warmup_steps and self.trainer.step % settings.logit_every == 0
        if due and exchange:
            self._try_compression(exchange.nats_per_efold)
        upper = self._logit_step(outcome, exchange.nats_per_efold) if due and exchange else None
        return BilevelRecord(
            step=self.trainer.step,
            training_loss=outcome.loss,
            noise_sequences=self.trainer.noise.sequences,
            nats_per_efold=exchange.nats_per_efold if exchange else None,
            entropy=float(torch.special.entr(weights).sum(-1).mean()),
            weights=weights,
            batch_weights=torch.softmax(self.logits.batch.detach() / self.temperature, -1),
            temperature=self.temperature,
            hard_seconds=self._hard_seconds(),
            trial_costs=self.upper.progress.trial_costs,
            sum_costs=self.upper.sums.trial_costs,
            upper=upper,
        )

    def _hard_seconds(self) -> float:
        plan = self.plan()
        time = self.upper.times[self.settings.batches.index(plan.global_batch_size)]
        return float(time.plan_seconds([plan.blocks])[0])

    def run(
        self,
        on_record: Callable[[BilevelRecord], None] = lambda record: None,
        folder: Path | None = None,
        checkpoint_every: int = 20,
    ) -> BilevelPlan:
        """All steps that are left.

        Args:
            on_record: Called after every step.
            folder: Where checkpoints go; None writes none.
            checkpoint_every: Steps between them.
        """
        while self.trainer.step < self.settings.num_steps:
            on_record(self.step())
            if folder is not None and self.trainer.step % checkpoint_every == 0:
                save_checkpoint(folder, self.trainer.step, self.state())
        return self.plan()

    def _try_compression(self, nats_per_efold: float) -> None:
        """Trials of every number of bits, at the widest group that may use it, where they are due."""
        settings, text = self.settings, self.corpus.train
        if not settings.trial_steps or self.trainer.step < self.trial_at:
            return
        self.trial_at = self.trainer.step + settings.trial_every
        steps = settings.trial_steps
        own, tried = widest(self.choices.gradient_pairs)
        costs = gradient_costs(self.trainer, self.plan().blocks, text, tried, steps, nats_per_efold)
        self.upper.progress.add_trial(torch.tensor([costs[pair] for pair in own]))
        own, tried = widest(self.choices.forward_pairs)
        costs = sum_costs(self.trainer, settings.num_blocks, text, tried, steps, nats_per_efold)
        self.upper.sums.add_trial(torch.tensor([costs[pair] for pair in own]))

    def _logit_step(self, outcome: WeightStep, nats_per_efold: float) -> UpperGradient:
        count, context = self.settings.global_batch_size, self.settings.context
        batches = (
            sample(self.corpus.train, count, context, self.generator),
            sample(self.corpus.validation, count, context, self.generator),
        )
        upper = self.upper.gradients(
            self.logits, self.temperature, self.trainer, batches, outcome.delivered, nats_per_efold
        )
        self.logits.choices.grad = upper.loss_part + upper.time_part
        self.logits.edges.grad, self.logits.batch.grad = upper.edges, upper.batch
        self.optimizer.step()
        self.optimizer.zero_grad()
        return upper

    def state(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        return {
            "settings": asdict(self.settings) | {"problem": fingerprint(self.problem)},
            "trainer": self.trainer.state(),
            "logits": [part.detach().clone() for part in self.logits.tensors()],
            "moments": [(m.clone(), s.clone()) for m, s in self.optimizer.moments],
            "optimizer_steps": self.optimizer.steps,
            "progress": vars(self.upper.progress).copy(),
            "sums": vars(self.upper.sums).copy(),
            "trial_at": self.trial_at,
            "generator": self.generator.get_state(),
            "curve": list(self.curve),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Errors:
            CheckpointError: it belongs to a search with other settings.
        """
        mine = asdict(self.settings) | {"problem": fingerprint(self.problem)}
        different = [k for k in mine if k not in RETRAIN_ONLY and state["settings"].get(k) != mine[k]]
        if different:
            key = different[0]
            raise CheckpointError(
                f"checkpoint: {key}={state['settings'].get(key)} was searched, but this run has "
                f"{key}={mine[key]}; use another folder."
            )
        self.trainer.restore(state["trainer"])
        with torch.no_grad():
            for part, saved in zip(self.logits.tensors(), state["logits"], strict=True):
                part.copy_(saved)
        self.optimizer.moments = [(m, s) for m, s in state["moments"]]
        self.optimizer.steps = state["optimizer_steps"]
        self.upper.progress, self.upper.sums = Progress(**state["progress"]), Progress(**state["sums"])
        self.trial_at = state["trial_at"]
        self.generator.set_state(state["generator"])
        self.curve = list(state["curve"])


def widest(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Of every pair the one with its bits and the widest group; and those that are different."""
    own = [max(pair for pair in pairs if pair[1] == bits) for _, bits in pairs]
    return own, list(dict.fromkeys(own))


def resume(search: BilevelSearch, folder: Path, on_refused: Callable[[str], None]) -> int:
    """Continue from the newest whole checkpoint of the folder, if there is one.

    Returns:
        The step that the search stands at.
    """
    state = load_latest(folder, on_refused)
    if state is not None:
        search.restore(state)
    return search.trainer.step
