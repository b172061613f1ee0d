"""The bilevel search: weight steps on training bytes, logit steps on validation bytes."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.checkpoint import CheckpointError, load_latest, save_checkpoint
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.estimators.mixture import gradient_shortfall, one_hot_sample, slopes
from darts_parallel.bilevel.estimators.switches import switch_losses
from darts_parallel.bilevel.estimators.trials import Shares, TrialTable, try_pairs, widest
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.local_steps import local_way
from darts_parallel.bilevel.measurements import measure
from darts_parallel.bilevel.quantize import Pair
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import Mixture, WeightStep, WeightTrainer, hard
from darts_parallel.bilevel.transformer import Weights, mixed_loss, plan_loss
from darts_parallel.bilevel.upper.joint_space import JointSpace
from darts_parallel.bilevel.upper.log_steps import LogSteps
from darts_parallel.bilevel.upper.relaxed_plans import UpperLevel, UpperStep
from darts_parallel.problem.problem import Problem

RETRAIN_ONLY = (
    "retrain_steps", "retrain_factor", "retrain_seeds", "random_plans", "validation_sequences",
    "evaluate_every", "seeds", "arms", "exact_seconds", "processes",
)  # fmt: skip
"""Settings that the search does not read: a checkpoint stays good when they change."""
NEGLIGIBLE = 1e-3
"""Weight of a gradient pair below which a mixture leaves it out."""


@dataclass(frozen=True)
class BilevelRecord:
    """One weight step, and the logit step after it where there was one."""

    step: int
    training_loss: float
    validation_loss: float | None
    noise_sequences: float | None
    nats_per_efold: float | None
    trained: tuple[Candidate, ...] | None
    """The plan that the weight step ran; None where it ran a mixture."""
    log_steps: LogSteps
    upper: UpperStep | None


def fingerprint(problem: Problem) -> str:
    """What tells problems apart that a checkpoint must not be carried between."""
    parts = asdict(problem.config)
    text = json.dumps(
        {key: parts[key] for key in ("model", "cluster", "training", "space", "cost", "search")},
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class BilevelSearch:
    """The search, as a state that advances step by step and can be written down between any two.

    Args:
        settings: Everything that can be chosen; `settings.seed` gives all random numbers.
        problem: Prices the seconds of a step.
        corpus: Bytes.
        jobs: Runs trials side by side.
    """

    def __init__(
        self, settings: BilevelSettings, problem: Problem, corpus: Corpus, jobs: Jobs | None = None
    ) -> None:
        self.settings, self.problem, self.corpus = settings, problem, corpus
        self.jobs = jobs or Jobs()
        ways = (*settings.schedules, *(local_way(every) for every in settings.sync_every if every > 1))
        self.space = JointSpace.build(problem, settings.batches, ways)
        self.generator = torch.Generator().manual_seed(settings.seed + 2)
        config = replace(problem.config.search, num_restarts=settings.num_restarts)
        logit_steps = -(-max(settings.num_steps - settings.warmup_steps, 1) // settings.logit_every)
        self.upper = UpperLevel(self.space, config, logit_steps, self.generator)
        self.rounding = settings.rounds.seeded(settings.seed + 3)
        self.trainer = WeightTrainer(settings, settings.global_batch_size, settings.seed, self.rounding)
        self.log_steps = LogSteps.zero(
            self.space.forward_pairs, self.space.gradient_pairs, settings.num_blocks, settings.batches
        )
        self.shares = Shares(settings.decay)
        self.trials: TrialTable | None = None
        self.curve: list[tuple[int, float]] = []
        self.logit_steps = 0
        self.passes = 0
        """Forward passes over one batch that the logits needed beside the weight steps."""
        self.began = time.perf_counter()

    @property
    def steps_spent(self) -> int:
        """Weight steps that the search has cost: its own and those of its trials."""
        return self.trainer.step + (self.trials.steps if self.trials else 0)

    def step(self) -> BilevelRecord:
        """One weight step, and a logit step where one is due."""
        settings = self.settings
        if settings.estimator == "trials" and self.trials is None:
            pairs = (self.space.forward_pairs, self.space.gradient_pairs)
            self.trials = try_pairs(
                settings, self.corpus.train, *pairs, self.jobs, settings.rounds, self.space.ways
            )
            self.log_steps = replace(self.log_steps, by_way=dict(self.trials.way_log_steps))
        tokens = self.trainer.next_batch(self.corpus.train)
        trained, outcome = self._weight_step(tokens)
        self.shares.see_rounding(outcome.rounding_noise)
        self.curve.append((self.trainer.step, outcome.loss))
        exchange = measure(self.curve)
        upper, validation_loss = None, None
        if self.trainer.step > settings.warmup_steps and self.trainer.step % settings.logit_every == 0:
            validation_loss = self._price(tokens, outcome, exchange.nats_per_efold if exchange else None)
            upper = self.upper.step(self.log_steps)
            self.logit_steps += 1
        return BilevelRecord(
            step=self.trainer.step,
            training_loss=outcome.loss,
            validation_loss=validation_loss,
            noise_sequences=self.trainer.noise.sequences,
            nats_per_efold=exchange.nats_per_efold if exchange else None,
            trained=trained,
            log_steps=self.log_steps,
            upper=upper,
        )

    def _weight_step(self, tokens: Tensor) -> tuple[tuple[Candidate, ...] | None, WeightStep]:
        """A step of the weights: exact in the warm-up, then as the leading relaxed plan says."""
        blocks = self.settings.num_blocks
        if self.trainer.step < self.settings.warmup_steps:
            return self._train_plan(tokens, (Candidate(1, 1),) * blocks)
        candidates, weights, _ = self.upper.leading_weights(self.log_steps)
        if self.settings.estimator == "trials":
            drawn = torch.multinomial(weights, 1, generator=self.generator).flatten().tolist()
            return self._train_plan(tokens, tuple(candidates[index] for index in drawn))
        pairs, pair_weights = self._forward_weights(candidates, weights)
        mix = self.settings.mix

        def loss(model: Weights, own: Tensor) -> Tensor:
            return mixed_loss(model, own, pairs, pair_weights, mix, self.rounding)

        return None, self.trainer.learn(tokens, loss, self._gradient_mixtures(candidates, weights))

    def _train_plan(
        self, tokens: Tensor, plan: tuple[Candidate, ...]
    ) -> tuple[tuple[Candidate, ...], WeightStep]:
        def loss(model: Weights, own: Tensor) -> Tensor:
            return plan_loss(model, own, plan, self.rounding)

        return plan, self.trainer.learn(tokens, loss, [hard(candidate.gradient_pair) for candidate in plan])

    def _forward_weights(
        self, candidates: tuple[Candidate, ...], weights: Tensor
    ) -> tuple[tuple[Pair, ...], Tensor]:
        """All forward pairs and what the candidates' weights give them."""
        pairs = self.space.forward_pairs
        return pairs, self._pair_weights(pairs, [one.forward_pair for one in candidates], weights)

    def _pair_weights(self, pairs: Sequence[Pair], own: Sequence[Pair], weights: Tensor) -> Tensor:
        """What candidates that have `own` pairs give every pair, `(blocks, pairs)`, float32.

        Gumbel: one-hot samples of it.
        """
        place = torch.tensor([pairs.index(pair) for pair in own])
        zeros = torch.zeros(len(weights), len(pairs), dtype=weights.dtype)
        summed = zeros.index_add(1, place, weights).float()
        return one_hot_sample(summed, self.generator) if self.settings.estimator == "gumbel" else summed

    def _gradient_mixtures(self, candidates: tuple[Candidate, ...], weights: Tensor) -> list[Mixture]:
        """How the blocks' gradients travel: mixtures, or one-hot samples of them."""
        own = tuple(candidate.gradient_pair for candidate in candidates)
        pairs = tuple(dict.fromkeys(own))
        mixtures: list[Mixture] = []
        for row in self._pair_weights(pairs, own, weights):
            kept = torch.nonzero(row > NEGLIGIBLE).flatten()
            mixtures.append((tuple(pairs[i] for i in kept.tolist()), row[kept] / row[kept].sum()))
        return mixtures

    def _price(self, tokens: Tensor, outcome: WeightStep, nats_per_efold: float | None) -> float | None:
        """Take new measurements into `log_steps`; returns a validation loss where one was computed.

        Args:
            tokens: Training bytes of the weight step.
            outcome: Of that step.
            nats_per_efold: Exchange rate of the run itself.
        """
        noise = self.trainer.noise.sequences or 0.0
        by_batch = {batch: float(torch.tensor(1.0 + noise / batch).log()) for batch in self.settings.batches}
        self.log_steps = replace(self.log_steps, by_batch=by_batch)
        count, context = self.settings.global_batch_size, self.settings.context
        one_level = self.settings.level == "one"
        held_out = tokens if one_level else sample(self.corpus.validation, count, context, self.generator)
        if self.settings.estimator == "trials":
            if self.logit_steps % self.settings.switch_every == 0:
                self._see_switches(held_out)
            self._share_trials()
            return None
        return self._see_slopes(tokens, held_out, outcome, nats_per_efold)

    def _see_switches(self, tokens: Tensor) -> None:
        """One measurement of hard one-layer switches around a plan drawn from the leading weights."""
        candidates, weights, _ = self.upper.leading_weights(self.log_steps)
        drawn = torch.multinomial(weights, 1, generator=self.generator).flatten().tolist()
        pairs = self._switched()
        if pairs:
            plan = [candidates[index] for index in drawn]
            nats = switch_losses(self.trainer.weights, tokens, plan, pairs, self.rounding)
            self.shares.see_switches(nats)
            self.passes += self.settings.num_blocks * (len(pairs) + 1)

    def _switched(self) -> list[Pair]:
        """For every lossy number of bits the pair of its widest group."""
        return list(dict.fromkeys(widest(self.space.forward_pairs).values()))

    def _share_trials(self) -> None:
        """Trials' costs, each block with its share of them."""
        assert self.trials is not None
        blocks, switched = self.settings.num_blocks, [bits for _, bits in self._switched()]
        shares = self.shares.of_forward(blocks, len(switched))
        forward = torch.zeros_like(self.log_steps.forward)
        for index, pair in enumerate(self.space.forward_pairs):
            if pair in self.trials.forward:
                own = shares[:, switched.index(pair[1])]
                forward[:, index] = own * self.trials.forward_log_steps[pair]
        sent = self.shares.of_gradient(blocks)
        gradient = torch.zeros_like(self.log_steps.gradient)
        for index, pair in enumerate(self.space.gradient_pairs):
            gradient[:, index] = sent * self.trials.gradient_log_steps.get(pair, 0.0)
        self.log_steps = replace(self.log_steps, forward=forward, gradient=gradient)

    def _see_slopes(
        self, tokens: Tensor, held_out: Tensor, outcome: WeightStep, nats_per_efold: float | None
    ) -> float:
        """Classic DARTS: prices are slopes of the mixture's validation loss, by the exchange rate."""
        candidates, weights, _ = self.upper.leading_weights(self.log_steps)
        pairs, pair_weights = self._forward_weights(candidates, weights)
        mix = self.settings.mix

        def loss(model: Weights, own: Tensor, by_pair: Tensor) -> Tensor:
            return mixed_loss(model, own, pairs, by_pair, mix, self.rounding)

        found = slopes(self.settings.order, loss, self.trainer, pair_weights, tokens, held_out)
        self.passes += 3 if self.settings.order == "first" else 8
        if nats_per_efold is not None:
            exact = next(i for i, (_, bits) in enumerate(pairs) if bits == max(b for _, b in pairs))
            nats = (found.by_pair - found.by_pair[:, exact : exact + 1]).double()
            lacking = gradient_shortfall(
                self.trainer, found.by_weight, outcome.mean, self.space.gradient_pairs
            )
            self.log_steps = replace(self.log_steps, forward=nats / nats_per_efold, gradient=lacking)
        return found.loss

    def run(
        self,
        on_record: Callable[[BilevelRecord], None] = lambda record: None,
        folder: Path | None = None,
        checkpoint_every: int = 20,
    ) -> None:
        """All steps that are left.

        Args:
            on_record: Called after every step.
            folder: Where checkpoints go; None writes none.
            checkpoint_every: Steps between them.
        """
        while self.trainer.step < self.settings.num_steps:
            on_record(self.step())
            # after the first step, too: the trials before it are most of the search's cost
            at_ends = self.trainer.step in (1, self.settings.num_steps)
            due = at_ends or self.trainer.step % checkpoint_every == 0
            if folder is not None and due:
                save_checkpoint(folder, self.trainer.step, self.state())

    def state(self) -> dict[str, Any]:
        """Everything that the next steps depend on."""
        known = self.log_steps
        return {
            "settings": asdict(self.settings) | {"problem": fingerprint(self.problem)},
            "trainer": self.trainer.state(),
            "upper": self.upper.state(),
            "log_steps": [
                known.forward.clone(),
                known.gradient.clone(),
                dict(known.by_batch),
                dict(known.by_way),
            ],
            "shares": [self.shares.forward, self.shares.gradient],
            "trials": None if self.trials is None else vars(self.trials).copy(),
            "generator": self.generator.get_state(),
            "rounding": self.rounding.generator and self.rounding.generator.get_state(),
            "curve": list(self.curve),
            "counts": [self.logit_steps, self.passes],
            "seconds": time.perf_counter() - self.began,
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
        self.upper.restore(state["upper"])
        forward, gradient, by_batch, by_way = state["log_steps"]
        self.log_steps = replace(
            self.log_steps, forward=forward, gradient=gradient, by_batch=by_batch, by_way=by_way
        )
        self.shares.forward, self.shares.gradient = state["shares"]
        self.trials = None if state["trials"] is None else TrialTable(**state["trials"])
        self.generator.set_state(state["generator"])
        if self.rounding.generator is not None:
            self.rounding.generator.set_state(state["rounding"])
        self.curve = list(state["curve"])
        self.logit_steps, self.passes = state["counts"]
        self.began = time.perf_counter() - state["seconds"]


def resume(search: BilevelSearch, folder: Path, on_refused: Callable[[str], None]) -> int:
    """Continue from the newest whole checkpoint of the folder, if there is one.

    Returns:
        The step that the search stands at.
    """
    state = load_latest(folder, on_refused)
    if state is not None:
        search.restore(state)
    return search.trainer.step
