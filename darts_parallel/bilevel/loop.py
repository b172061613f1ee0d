"""The bilevel search: weight steps on training bytes, logit steps at the prices that training gives bits.

Bits are priced in steps by trial: short trainings from the initial weights, with paired batches.

A choice is priced by training with it from the start, because weights that learned with nearly exact sums
underrate what a rounding costs, and a mixture's gradient does so even more: at weight p a rounding error e of
mean zero enters the loss as p e, so that its slope is about p e'He and vanishes with p, where the whole step
costs half of e'He. Trials depend neither on the network nor on the logits: one table serves a whole search.

How a trial is read matters as much (`experiments/results/bilevel_estimators.md`): before the blocks
contribute anything, rounding what they send costs nothing, so only the last fifth of a trial counts; and nats
become steps by the exact trial's own curve there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel._measurements import log_delay, nats_per_efold
from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._relaxed_plans import UpperLevel, UpperStep
from darts_parallel.bilevel._trainer import (
    Mixture,
    WeightStep,
    WeightTrainer,
    gradient_shortfall,
    slopes,
)
from darts_parallel.bilevel.data import Corpus, sample
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import EXACT, Candidate, JointSpace, LogSlowdown
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.transformer import Weights, mixed_loss
from darts_parallel.cost import LOSSLESS
from darts_parallel.problem import Problem

READ = 0.8
"""Share of a trial's steps before its losses are compared."""
NEXT_SEED = 10_007
"""Between the seeds of one search's trials."""


@dataclass(frozen=True)
class TrialTable:
    """Log slowdown by lossy collectives that all blocks use.

    Attributes:
        forward: Price of every lossy `(tp, tp_comm_bits)`.
        gradient: Price of every lossy `(dp, grad_comm_bits)`.
        steps: Number of weight steps of all trials together.
    """

    forward: dict[Pair, float]
    gradient: dict[Pair, float]
    steps: int


def widest(pairs: Sequence[Pair]) -> dict[Pair, Pair]:
    """Map every lossy pair to that of its bits and the widest group, which stands for all of them."""
    lossy = [pair for pair in pairs if pair[1] < LOSSLESS]
    return {pair: max(other for other in lossy if other[1] == pair[1]) for pair in lossy}


def train_losses(
    settings: BilevelSettings,
    text: Tensor,
    plan: Sequence[Candidate],
    steps: int,
    seed: int,
) -> list[float]:
    """Train a plan from scratch; return the losses of all steps, nats.

    Args:
        plan: One candidate for each block.
        seed: Of weights and batches: plans of equal seeds see equal batches.
    """
    trainer = WeightTrainer(settings, settings.global_batch_size, seed, measure_noise=False)
    return [trainer.learn_plan(trainer.next_batch(text), plan).loss for _ in range(steps)]


def try_pairs(
    settings: BilevelSettings,
    text: Tensor,
    forward: Sequence[Pair],
    gradient: Sequence[Pair],
    jobs: Jobs,
) -> TrialTable:
    """Try every number of bits at its widest group, all blocks by it, on several seeds.

    Args:
        forward: `(tp, tp_comm_bits)` of the space.
        gradient: `(dp, grad_comm_bits)` of the space.
    """
    sums = widest(forward)
    sent = widest(gradient)
    plans = [EXACT]
    for tp, bits in dict.fromkeys(sums.values()):
        plans.append(Candidate(tp, 1, tp_comm_bits=bits))
    for dp, bits in dict.fromkeys(sent.values()):
        plans.append(Candidate(1, dp, grad_comm_bits=bits))
    steps = settings.trial_steps
    seeds = [settings.seed + NEXT_SEED * index for index in range(settings.trial_seeds)]
    arguments = []
    for candidate in plans:
        blocks = (candidate,) * settings.num_blocks
        arguments += [(settings, text, blocks, steps, seed) for seed in seeds]
    losses = jobs.map(train_losses, arguments)
    curves = {candidate: [next(losses) for _ in seeds] for candidate in plans}
    slowdown = _log_slowdowns(curves, steps)
    by_sums = {}
    for pair, (tp, bits) in sums.items():
        by_sums[pair] = slowdown[Candidate(tp, 1, tp_comm_bits=bits)]
    by_gradients = {}
    for pair, (dp, bits) in sent.items():
        by_gradients[pair] = slowdown[Candidate(1, dp, grad_comm_bits=bits)]
    return TrialTable(by_sums, by_gradients, steps * len(arguments))


def _log_slowdowns(
    curves: dict[Candidate, list[list[float]]], steps: int
) -> dict[Candidate, float]:
    """Turn paired loss curves, one a seed, into log slowdowns against the exact ones."""
    exact = curves[EXACT]
    together = [mean(step) for step in zip(*exact, strict=True)]
    middle = middle_of_read(steps)
    found = {}
    for candidate, own in curves.items():
        nats = mean(map(mean_excess, own, exact))
        found[candidate] = log_delay(together, nats, middle)
    return found


def mean_excess(curve: Sequence[float], exact: Sequence[float]) -> float:
    """Return the mean difference of two paired curves over the end that counts, nats."""
    first = _first_read(len(exact))
    pairs = zip(curve[first:], exact[first:], strict=True)
    return mean(own - reference for own, reference in pairs)


def middle_of_read(steps: int) -> float:
    """Return the step in the middle of a trial's end."""
    return (_first_read(steps) + 1 + steps) / 2


def _first_read(steps: int) -> int:
    return min(int(READ * steps), steps - 1)


@dataclass
class GradientShares:
    """How much of what compressed gradients cost comes from which block, as a moving average.

    Attributes:
        decay: Of the average.
        energy: Share of each block in the energy of gradient rounding, `(blocks,)`; None before any step.
    """

    decay: float
    energy: Tensor | None = None

    def update(self, energy: Tensor) -> None:
        """Take in the rounding energies of one weight step, `(blocks,)`."""
        total = energy.double().sum().clamp(min=torch.finfo(torch.float64).tiny)
        own = energy.double() / total
        if self.energy is None:
            self.energy = own
        else:
            self.energy = self.decay * self.energy + (1.0 - self.decay) * own

    def of(self, blocks: int) -> Tensor:
        """Return the shares, `(blocks,)`, which sum to 1; equal ones before any step."""
        if self.energy is None:
            return torch.full((blocks,), 1.0 / blocks, dtype=torch.float64)
        return self.energy / self.energy.sum().clamp(min=1e-30)


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
    log_slowdown: LogSlowdown
    upper: UpperStep | None


class BilevelSearch:
    """The search, as a state that advances step by step.

    Args:
        settings: Everything that can be chosen; `settings.seed` gives all random numbers.
        problem: Prices the seconds of a step.
        corpus: Bytes.
    """

    def __init__(
        self,
        settings: BilevelSettings,
        problem: Problem,
        corpus: Corpus,
        jobs: Jobs | None = None,
    ) -> None:
        self.settings = settings
        self.problem = problem
        self.corpus = corpus
        self.jobs = jobs or Jobs()
        self.space = JointSpace.build(problem, settings.batches)
        self.generator = torch.Generator().manual_seed(settings.seed + 2)
        config = replace(problem.config.search, num_restarts=settings.num_restarts)
        logit_steps = max(settings.num_steps - settings.warmup_steps, 1)
        self.upper = UpperLevel(self.space, config, logit_steps, self.generator)
        self.trainer = WeightTrainer(settings, settings.global_batch_size, settings.seed)
        pairs = (self.space.forward_pairs, self.space.gradient_pairs)
        self.log_slowdown = LogSlowdown.zero(*pairs, settings.num_blocks, settings.batches)
        self.shares = GradientShares(settings.decay)
        self.trials: TrialTable | None = None
        self.curve: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    @property
    def steps_spent(self) -> int:
        """Weight steps that the search has cost: its own and those of its trials."""
        return self.trainer.step + (self.trials.steps if self.trials else 0)

    @property
    def priced(self) -> bool:
        """Whether anything is known of what bits cost."""
        return self.trainer.step > self.settings.warmup_steps

    def run(self, on_record: Callable[[BilevelRecord], None] = lambda record: None) -> None:
        """Make all steps that are left and hand on the record of each."""
        while self.trainer.step < self.settings.num_steps:
            on_record(self.step())

    def step(self) -> BilevelRecord:
        """Make one weight step, and a logit step where one is due."""
        settings = self.settings
        if settings.estimator == "trials" and self.trials is None:
            pairs = (self.space.forward_pairs, self.space.gradient_pairs)
            self.trials = try_pairs(settings, self.corpus.train, *pairs, self.jobs)
        tokens = self.trainer.next_batch(self.corpus.train)
        trained, outcome = self._weight_step(tokens)
        self.shares.update(outcome.rounding_noise)
        self.curve.append((self.trainer.step, outcome.loss))
        exchange = nats_per_efold(self.curve)
        upper = None
        validation_loss = None
        if self.priced:
            validation_loss = self._price(tokens, outcome, exchange)
            upper = self.upper.step(self.log_slowdown)
        seen: dict[str, Any] = {"training_loss": outcome.loss}
        seen["validation_loss"] = validation_loss
        seen["noise_sequences"] = self.trainer.noise.sequences
        seen["nats_per_efold"] = exchange
        return BilevelRecord(
            step=self.trainer.step,
            **seen,
            trained=trained,
            log_slowdown=self.log_slowdown,
            upper=upper,
        )

    def _weight_step(self, tokens: Tensor) -> tuple[tuple[Candidate, ...] | None, WeightStep]:
        """Step the weights: exactly in the warm-up, then as the leading relaxed plan says."""
        if self.trainer.step < self.settings.warmup_steps:
            plan = (EXACT,) * self.settings.num_blocks
            return plan, self.trainer.learn_plan(tokens, plan)
        candidates, weights = self.upper.leading_weights(self.log_slowdown)
        if self.settings.estimator == "trials":
            drawn = torch.multinomial(weights, 1, generator=self.generator).flatten().tolist()
            plan = tuple(candidates[index] for index in drawn)
            return plan, self.trainer.learn_plan(tokens, plan)
        pairs = self.space.forward_pairs
        pair_weights = _pair_weights(
            pairs, [candidate.forward_pair for candidate in candidates], weights
        )

        def loss(model: Weights, batch: Tensor) -> Tensor:
            return mixed_loss(model, batch, pairs, pair_weights, self.settings.block_size)

        return None, self.trainer.learn(tokens, loss, self._gradient_mixtures(candidates, weights))

    def _gradient_mixtures(
        self, candidates: tuple[Candidate, ...], weights: Tensor
    ) -> list[Mixture]:
        """Say how the blocks' gradients travel."""
        by_candidate = tuple(candidate.gradient_pair for candidate in candidates)
        pairs = tuple(dict.fromkeys(by_candidate))
        mixtures: list[Mixture] = []
        for row in _pair_weights(pairs, by_candidate, weights):
            used = torch.nonzero(row > NEGLIGIBLE).flatten()
            kept = tuple(pairs[place] for place in used.tolist())
            mixtures.append((kept, row[used] / row[used].sum()))
        return mixtures

    def _price(
        self,
        tokens: Tensor,
        outcome: WeightStep,
        exchange: float | None,
    ) -> float | None:
        """Take new measurements into the prices; return a validation loss where one was computed.

        Args:
            exchange: Nats per e-fold of steps of the run itself.
        """
        noise = self.trainer.noise.sequences or 0.0
        by_batch = {}
        for batch in self.settings.batches:
            by_batch[batch] = float(torch.tensor(1.0 + noise / batch).log())
        self.log_slowdown = replace(self.log_slowdown, by_batch=by_batch)
        if self.trials is not None:
            self._share_trials(self.trials)
            return None
        return self._see_slopes(tokens, outcome, exchange)

    def _share_trials(self, trials: TrialTable) -> None:
        """Price pairs by their trials: equal shares of the blocks in sums, measured ones in gradients."""
        blocks = self.settings.num_blocks
        sums = [trials.forward.get(pair, 0.0) for pair in self.space.forward_pairs]
        sent = [trials.gradient.get(pair, 0.0) for pair in self.space.gradient_pairs]
        forward = torch.tensor([sums] * blocks, dtype=torch.float64) / blocks
        by_pair = torch.tensor(sent, dtype=torch.float64)
        gradient = self.shares.of(blocks).unsqueeze(1) * by_pair
        self.log_slowdown = replace(self.log_slowdown, forward=forward, gradient=gradient)

    def _see_slopes(
        self,
        tokens: Tensor,
        outcome: WeightStep,
        exchange: float | None,
    ) -> float:
        """Price pairs by slopes of the mixture's validation loss (classic DARTS) at the exchange rate."""
        count = self.settings.global_batch_size
        context = self.settings.context
        held_out = sample(self.corpus.validation, count, context, self.generator)
        candidates, weights = self.upper.leading_weights(self.log_slowdown)
        pairs = self.space.forward_pairs
        pair_weights = _pair_weights(
            pairs, [candidate.forward_pair for candidate in candidates], weights
        )

        def loss(
            model: Weights,
            batch: Tensor,
            by_pair: Tensor,
        ) -> Tensor:
            return mixed_loss(model, batch, pairs, by_pair, self.settings.block_size)

        ahead = None
        if self.settings.order == "second":  # through the trainer's next step
            rate = self.trainer.learning_rate
            ahead = {name: rate * scale for name, scale in self.trainer.preconditioner().items()}
        found = slopes(loss, self.trainer.weights, pair_weights, held_out, tokens, ahead)
        if exchange is not None:
            bits = [pair[1] for pair in pairs]
            exact = bits.index(max(bits))
            nats = (found.by_pair - found.by_pair[:, exact : exact + 1]).double()
            gains = (found.by_weight, outcome.mean, self.space.gradient_pairs)
            lacking = gradient_shortfall(self.trainer, *gains)
            self.log_slowdown = replace(
                self.log_slowdown, forward=nats / exchange, gradient=lacking
            )
        return found.loss


def _pair_weights(
    pairs: Sequence[Pair],
    by_candidate: Sequence[Pair],
    weights: Tensor,
) -> Tensor:
    """Sum the weights of candidates that share a pair, `(blocks, pairs)`, float32."""
    place = torch.tensor([pairs.index(pair) for pair in by_candidate])
    zeros = torch.zeros(len(weights), len(pairs), dtype=weights.dtype)
    return zeros.index_add(1, place, weights).float()
