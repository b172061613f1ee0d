"""Trials: short trainings from the initial weights, with paired batches, before the loop begins.

They price few bits, because weights that learned with nearly exact sums underrate what a rounding costs. Only
the last fifth of a trial counts: before the blocks contribute anything, their roundings cost nothing. Nats
become steps by the exact training's curve there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from torch import Tensor

from darts_parallel.bilevel._measurements import log_delay
from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.space import EXACT, Candidate, LogSlowdown
from darts_parallel.config import LOSSLESS

READ = 0.8
"""Share of a trial's steps before its losses are compared."""
NEXT_SEED = 10_007
"""Between the seeds of one search's trials."""


def log_slowdown(
    curves: Sequence[Sequence[float]],
    known: Sequence[Sequence[float]],
) -> float:
    """Turn how far losses lie above known ones of the same seeds, over the end that counts, into steps."""
    together = [mean(step) for step in zip(*known, strict=True)]
    steps = len(together)
    first = min(int(READ * steps), steps - 1)
    own = mean(mean(curve[first:]) for curve in curves)
    return log_delay(together, own - mean(together[first:]), (first + 1 + steps) / 2)


@dataclass
class Trials:
    """Trainings of one search from the initial weights; each kind runs once."""

    settings: BilevelSettings
    text: Tensor
    """Training bytes."""

    def __post_init__(self) -> None:
        count = self.settings.trial_seeds
        self.seeds = [self.settings.seed + NEXT_SEED * index for index in range(count)]
        self.exact = self._train(EXACT)

    def _train(self, candidate: Candidate) -> list[list[float]]:
        """Train all blocks by one candidate; return the losses of all steps, nats, seed by seed."""
        settings = self.settings
        plan = (candidate,) * settings.num_blocks
        curves = []
        for seed in self.seeds:
            trainer = WeightTrainer(settings, seed, measure_noise=False)
            steps = range(settings.trial_steps)
            curves.append(
                [trainer.learn_plan(trainer.next_batch(self.text), plan).loss for _ in steps]
            )
        return curves

    def price_bits(self, free: LogSlowdown) -> LogSlowdown:
        """Try every number of bits at its widest group, all blocks by it; blocks share its price equally.

        Args:
            free: Prices of 0 for the pairs of the space.
        """
        forward = self._shares(free.forward_pairs, lambda ranks, bits: Candidate(ranks, 1, bits))
        gradient = self._shares(
            free.gradient_pairs,
            lambda ranks, bits: Candidate(1, ranks, LOSSLESS, bits),
        )
        return free.of_pairs(forward, gradient)

    def _shares(self, pairs: Sequence[Pair], of: Callable[[int, int], Candidate]) -> list[float]:
        """Return what one block costs in log slowdown by every pair; the widest group stands for its bits."""
        widest = {bits: ranks for ranks, bits in sorted(pairs)}
        prices = {LOSSLESS: 0.0}
        for bits, ranks in widest.items():
            if bits < LOSSLESS:
                slowdown = log_slowdown(self._train(of(ranks, bits)), self.exact)
                prices[bits] = slowdown / self.settings.num_blocks
        return [prices[bits] for _, bits in pairs]
