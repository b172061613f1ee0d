"""Prices of few bits in steps, by trial: short trainings from the initial weights, with paired batches.

A choice is priced by training with it from the start, because weights that learned with nearly exact sums
underrate what a rounding costs, and a mixture's gradient does so even more: at weight p a rounding error e of
mean zero enters the loss as p e, so that its slope is about p e'He and vanishes with p, where the whole step
costs half of e'He. Trials depend neither on the network nor on the logits: one table serves a whole search.

How a trial is read matters as much (`experiments/results/bilevel_estimators.md`): before the blocks
contribute anything, rounding what they send costs nothing, so only the last fifth of a trial counts; and nats
become steps by the exact trial's own curve there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from darts_parallel.bilevel._log_slowdown import EXACT, Candidate
from darts_parallel.bilevel._measurements import log_delay
from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.cost import LOSSLESS

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
    settings: BilevelSettings, text: Tensor, plan: Sequence[Candidate], steps: int, seed: int
) -> list[float]:
    """Train a plan from scratch; return the losses of all steps, nats.

    Args:
        settings: Sizes and learning rate.
        text: Training bytes.
        plan: One candidate for each block.
        steps: Weight steps.
        seed: Of weights and batches: plans of equal seeds see equal batches.
    """
    trainer = WeightTrainer(settings, settings.global_batch_size, seed, measure_noise=False)
    return [trainer.learn_plan(trainer.next_batch(text), plan).loss for _ in range(steps)]


def try_pairs(
    settings: BilevelSettings, text: Tensor, forward: Sequence[Pair], gradient: Sequence[Pair], jobs: Jobs
) -> TrialTable:
    """Try every number of bits at its widest group, all blocks by it, on several seeds.

    Args:
        settings: `trial_steps`, `trial_seeds`, sizes and the seed.
        text: Training bytes.
        forward: `(tp, tp_comm_bits)` of the space.
        gradient: `(dp, grad_comm_bits)` of the space.
        jobs: Runs trials side by side.
    """
    sums, sent = widest(forward), widest(gradient)
    plans: dict[tuple[str, Pair], Candidate] = {("exact", (1, LOSSLESS)): EXACT}
    plans |= {("forward", pair): Candidate(pair[0], 1, tp_comm_bits=pair[1]) for pair in sums.values()}
    plans |= {("gradient", pair): Candidate(1, pair[0], grad_comm_bits=pair[1]) for pair in sent.values()}
    steps = settings.trial_steps
    seeds = [settings.seed + NEXT_SEED * index for index in range(settings.trial_seeds)]
    arguments = [
        (settings, text, (candidate,) * settings.num_blocks, steps, seed)
        for candidate in plans.values()
        for seed in seeds
    ]
    losses = jobs.map(train_losses, arguments)
    curves = {key: [next(losses) for _ in seeds] for key in plans}
    exact = curves["exact", (1, LOSSLESS)]
    together = [mean(step) for step in zip(*exact, strict=True)]
    slowdown = {
        key: log_delay(together, mean(map(behind, curve, exact)), middle_of_read(steps))
        for key, curve in curves.items()
    }
    return TrialTable(
        {pair: slowdown["forward", wide] for pair, wide in sums.items()},
        {pair: slowdown["gradient", wide] for pair, wide in sent.items()},
        steps * len(arguments),
    )


def behind(curve: Sequence[float], exact: Sequence[float]) -> float:
    """Return the mean difference of two paired curves over the end that counts, nats."""
    first = _first_read(len(exact))
    return mean(a - b for a, b in zip(curve[first:], exact[first:], strict=True))


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
        own = energy.double() / energy.double().sum().clamp(min=torch.finfo(torch.float64).tiny)
        self.energy = own if self.energy is None else self.decay * self.energy + (1.0 - self.decay) * own

    def of(self, blocks: int) -> Tensor:
        """Return the shares, `(blocks,)`, which sum to 1; equal ones before any step."""
        if self.energy is None:
            return torch.full((blocks,), 1.0 / blocks, dtype=torch.float64)
        return self.energy / self.energy.sum().clamp(min=1e-30)
