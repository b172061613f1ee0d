"""The bilevel loop, from top to bottom: weight step, prices, logit step, and the plan that is left.

1. The weights step on training bytes, at the global batch size and with the bits of the leading relaxed plan.
2. What was measured becomes prices in steps. A look-ahead prices batch sizes at the weights as they are:
   copies of the training go on for equal predicted seconds, and their losses are compared. Trials before the
   loop or slopes of a mixture's loss (DARTS, Liu et al. 2019, arXiv 1806.09055) price few bits.
3. The logits step on `log(seconds per step) + log(steps)`.
4. The fastest batch size by each look-ahead, with its best plan, becomes a phase.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import log
from operator import attrgetter

import torch
from torch import Tensor

from darts_parallel.bilevel._measurements import nats_per_efold
from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._trainer import (
    Mixture,
    WeightStep,
    WeightTrainer,
    gradient_shortfall,
    slopes,
)
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.logits import Leader, UpperLevel
from darts_parallel.bilevel.optimum import find_optimum
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.space import EXACT, BatchPlan, Candidate, JointSpace, LogSlowdown
from darts_parallel.bilevel.trials import Trials
from darts_parallel.config import LOSSLESS
from darts_parallel.cost import flatnonzero
from darts_parallel.gradient import NoPlanFitsError, StepRecord
from darts_parallel.problem import Problem

NEWEST = 0.4
"""Weight of the last look-ahead in the moving averages of gains."""
NEGLIGIBLE = 1e-3
"""Weight of a gradient pair below which a mixture leaves it out."""


@dataclass(frozen=True)
class BilevelRecord:
    """One weight step, and the logit step after it where there was one."""

    step: int
    batch: int
    """Global batch size of the weight step."""
    training_loss: float
    validation_loss: float | None
    noise_sequences: float | None
    """Gradient noise scale, sequences."""
    upper: StepRecord | None


@dataclass(frozen=True)
class TrainingPhase:
    """Weight steps from one on, and how they are made."""

    from_step: int
    plan: BatchPlan


class BilevelLoop:
    """The loop, as a state that advances step by step.

    Args:
        settings: Everything that can be chosen; `settings.seed` gives all random numbers.
        problem: Prices the seconds of a step.
        corpus: Bytes.
        tried: Prices of few bits by another loop's trials; None runs trials of its own.
    """

    def __init__(
        self,
        settings: BilevelSettings,
        problem: Problem,
        corpus: Corpus,
        tried: LogSlowdown | None = None,
    ) -> None:
        self.settings = settings
        self.problem = problem
        self.corpus = corpus
        self.space = JointSpace.build(problem, settings.batches)
        self.generator = torch.Generator().manual_seed(settings.seed + 2)
        config = replace(problem.config.search, num_restarts=settings.num_restarts)
        logit_steps = (settings.num_steps - settings.warmup_steps) // settings.logit_every
        self.upper = UpperLevel(self.space, config, max(logit_steps, 1), self.generator)
        self.trainer = WeightTrainer(settings, settings.seed)
        self.prices = self.space.free.at_bits(LOSSLESS, LOSSLESS)
        self.gains: dict[int, float] = {}
        """Nats that every batch size gains in a look-ahead, moving averages."""
        self.measured: dict[int, Mapping[int, float]] = {}
        """Log slowdown of every batch size by the weight step after which a look-ahead found it."""
        self.tried = tried
        self.leader: Leader | None = None
        self.outcome: WeightStep | None = None
        """Measurements of the last weight step."""
        self.curve: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    def run(self, on_record: Callable[[BilevelRecord], None] = lambda record: None) -> None:
        """Make all steps that are left and hand on the record of each; trials come before the first."""
        if self.tried is None:
            self.tried = self.prices
            if self.settings.estimator == "trials" and len(self.prices.all_bits) > 1:
                self.tried = Trials(self.settings, self.corpus.train).price_bits(self.prices)
        self.prices = self.tried
        while self.trainer.step < self.settings.num_steps:
            on_record(self.step())

    def step(self) -> BilevelRecord:
        """Make one weight step, and a logit step where one is due."""
        trainer = self.trainer
        settings = self.settings
        step = trainer.step
        warm = step >= settings.warmup_steps
        batch = trainer.batch
        trainer.frozen = warm and settings.control == "frozen_weights"
        tokens = trainer.next_batch(self.corpus.train)
        if warm and settings.control == "no_weight_step" and self.outcome is not None:
            trainer.step += 1
        else:
            self.outcome = self._weight_step(tokens)
        outcome = self.outcome
        self.curve.append((step + 1, outcome.loss))
        upper = loss = None
        if warm and (step - settings.warmup_steps) % settings.logit_every == 0:
            loss = self._price(tokens, outcome)
            upper = self.upper.step(self.prices, move=settings.control != "random_logits")
            self.leader = self.upper.leader(self.prices)
            trainer.batch = self.leader.batch
        noise = trainer.noise.sequences
        return BilevelRecord(step + 1, batch, outcome.loss, loss, noise, upper)

    def phases(self) -> list[TrainingPhase]:
        """Return the fastest batch size, with its best plan, by every look-ahead.

        Errors:
            InfeasibleError: no plan fits the memory.
        """
        plans = self._best_plans()
        found = [TrainingPhase(0, plans[0])]
        known = self.prices.by_batch
        for step, by_batch in self.measured.items():
            changes = {batch: own - known[batch] for batch, own in by_batch.items()}
            best = min(plans, key=lambda plan: plan.value + changes[plan.batch])
            if best is not found[-1].plan:
                found.append(TrainingPhase(step, best))
        return found

    def best_plan(
        self,
        batch: int,
        prices: LogSlowdown | None = None,
    ) -> BatchPlan | None:
        """Return the best plan of a batch size, by the learned prices or others; None where none fits.

        Bits without a price are banned.
        """
        return find_optimum(self.space, prices or self.prices, batch, self.settings.exact_seconds)

    def _best_plans(self) -> list[BatchPlan]:
        """Return the best plan of every batch size that fits, that of the given one first.

        Errors:
            InfeasibleError: no plan fits the memory.
        """
        every = [self.best_plan(batch) for batch in self.prices.by_batch]
        plans = [plan for plan in every if plan is not None]
        if not plans:
            raise NoPlanFitsError(self.problem, list(self.space.tables))
        given = self.settings.global_batch_size
        return sorted(plans, key=lambda plan: abs(plan.batch - given))

    @cached_property
    def _first_plans(self) -> dict[int, BatchPlan]:
        """Return the best plans by batch size, before the first logit step."""
        return {plan.batch: plan for plan in self._best_plans()}

    def _weight_step(self, tokens: Tensor) -> WeightStep:
        """Step the weights: exactly in the warm-up, then as the leading relaxed plan says."""
        leader = self.leader
        if leader is None:
            return self.trainer.learn_plan(tokens, (EXACT,) * self.settings.num_blocks)
        if self.settings.estimator == "trials":
            drawn = torch.multinomial(leader.weights, 1, generator=self.generator)
            plan = [leader.candidates[index] for index in drawn.flatten().tolist()]
            return self.trainer.learn_plan(tokens, plan)
        pairs = self.prices.forward_pairs
        weights = self._pair_weights(leader, pairs, attrgetter("forward_pair"))
        loss = partial(self.trainer.toy.mixed_loss, pair_weights=weights, pairs=pairs)
        return self.trainer.learn(tokens, loss, self._gradient_mixtures(leader))

    def _gradient_mixtures(self, leader: Leader) -> list[Mixture]:
        """Say how the blocks' gradients travel."""
        pairs = self.prices.gradient_pairs
        mixtures: list[Mixture] = []
        for row in self._pair_weights(leader, pairs, attrgetter("gradient_pair")):
            used = flatnonzero(row > NEGLIGIBLE)
            kept = tuple(pairs[place] for place in used.tolist())
            mixtures.append((kept, row[used] / row[used].sum()))
        return mixtures

    def _pair_weights(
        self,
        leader: Leader,
        pairs: Sequence[Pair],
        of: Callable[[Candidate], Pair],
    ) -> Tensor:
        """Sum the weights of candidates that share a pair, `(blocks, pairs)`, float32."""
        place = torch.tensor([pairs.index(of(candidate)) for candidate in leader.candidates])
        zeros = torch.zeros(len(leader.weights), len(pairs), dtype=leader.weights.dtype)
        return zeros.index_add(1, place, leader.weights).float()

    def _price(
        self,
        tokens: Tensor,
        outcome: WeightStep,
    ) -> float:
        """Take new measurements into the prices; return the validation loss, nats."""
        settings = self.settings
        count = settings.validation_sequences
        held_out = sample(self.corpus.validation, count, settings.context, self.generator)
        due = self.upper.step_number % settings.look_ahead_every == 0
        if due and len(self.prices.by_batch) > 1:
            self._look_ahead(held_out)
        if settings.estimator == "mixture":
            seen = tokens if settings.order == "one_level" else held_out
            return self._see_slopes(tokens, seen, outcome)
        return self._validate(self.trainer, held_out)

    def _look_ahead(self, held_out: Tensor) -> None:
        """Price batch sizes by what copies of the training gain in equal predicted seconds.

        A copy that gains 10 % less than the one of the given size takes 10 % longer, in first order.
        """
        settings = self.settings
        plans = self._first_plans
        given, first = next(iter(plans.items()))
        before = self._validate(self.trainer, held_out)
        for batch, plan in plans.items():
            copied = deepcopy(self.trainer)  # common random numbers
            copied.batch = batch
            copied.frozen = copied.measure_noise = False
            for _ in range(max(round(settings.look_ahead_steps * first.seconds / plan.seconds), 1)):
                tokens = copied.next_batch(self.corpus.train)
                copied.learn_plan(tokens, (EXACT,) * settings.num_blocks)
            gain = before - self._validate(copied, held_out)
            mean = self.gains.get(batch, gain)
            self.gains[batch] = mean + (gain - mean) * NEWEST
        whole = self.gains[given]
        if whole > 0.0:
            steps = dict(self.prices.by_batch)
            for batch, plan in plans.items():
                pace = log(plan.seconds / first.seconds)
                steps[batch] = 1.0 - self.gains[batch] / whole - pace
            self.prices = replace(self.prices, by_batch=steps)
            self.measured[self.trainer.step] = steps

    def _validate(self, trainer: WeightTrainer, held_out: Tensor) -> float:
        """Return the loss of a trainer's weights at 16 bits, nats."""
        with torch.no_grad():
            exact = (EXACT,) * self.settings.num_blocks
            return float(trainer.toy.plan_loss(trainer.weights, held_out, exact))

    def _see_slopes(
        self,
        tokens: Tensor,
        seen: Tensor,
        outcome: WeightStep,
    ) -> float:
        """Price pairs by slopes of the mixture's loss on the seen bytes, in steps of the run itself."""
        trainer = self.trainer
        leader = self.leader or self.upper.leader(self.prices)
        prices = self.prices
        pairs = prices.forward_pairs
        weights = self._pair_weights(leader, pairs, attrgetter("forward_pair"))
        loss = partial(trainer.toy.mixed_loss, pairs=pairs)
        ahead = None
        if self.settings.order == "second":  # through the trainer's next step
            rate = trainer.learning_rate
            ahead = {name: rate * scale for name, scale in trainer.preconditioner().items()}
        found = slopes(loss, trainer.weights, weights, seen, tokens, ahead)
        exchange = nats_per_efold(self.curve)
        if exchange is not None:
            # exact pairs come first; what a slope gains over them is luck
            nats = (found.by_pair - found.by_pair[:, :1]).double()
            gains = (found.by_weight, outcome.mean, prices.gradient_pairs)
            lacking = gradient_shortfall(trainer, *gains)
            forward = (nats / exchange).clamp(min=0.0)
            self.prices = replace(prices, forward=forward, gradient=lacking.clamp(min=0.0))
        return found.loss
