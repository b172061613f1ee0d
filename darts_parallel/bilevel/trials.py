"""Trials: short trainings from the initial weights, with paired batches, before the loop begins.

They price few bits, because weights that learned with nearly exact sums underrate what a rounding costs. They
also say how large a batch must be before more sequences hardly save steps, in units of the gradient noise
scale: Adam at a fixed learning rate gains less from a large batch than the noise scale promises.

Only the last fifth of a trial counts: before the blocks contribute anything, rounding what they send costs
nothing. Nats become steps by the curve of the faster training there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import mean

from torch import Tensor

from darts_parallel.bilevel._measurements import log_delay
from darts_parallel.bilevel._quantize import Pair
from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.space import EXACT, Candidate, LogSlowdown
from darts_parallel.cost import LOSSLESS

READ = 0.8
"""Share of a trial's steps before its losses are compared."""
NEXT_SEED = 10_007
"""Between the seeds of one search's trials."""
WIDER = 4
"""Global batch size of the wider trials over that of the others."""
MOST_SAVED = 0.9
"""Share of `WIDER` that the wider trials save in steps at most, so that the critical batch is finite."""


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
        self.noise: list[float] = []
        """Gradient noise scales along the exact trials, sequences."""
        self.exact = self._train(EXACT, self.settings.global_batch_size)
        self.known = {EXACT: 0.0}

    def _train(self, candidate: Candidate, batch: int) -> list[list[float]]:
        """Train all blocks by one candidate; return the losses of all steps, nats, seed by seed."""
        plan = (candidate,) * self.settings.num_blocks
        curves = []
        for seed in self.seeds:
            trainer = WeightTrainer(self.settings, batch, seed)
            curve = []
            for _ in range(self.settings.trial_steps):
                curve.append(trainer.learn_plan(trainer.next_batch(self.text), plan).loss)
                if candidate == EXACT and trainer.noise.sequences is not None:
                    self.noise.append(trainer.noise.sequences)
            curves.append(curve)
        return curves

    def critical_share(self) -> float:
        """Return the critical batch size over the gradient noise scale.

        Steps to a loss go as `1 + critical / B`; the ratio of two batch sizes' steps gives the critical one.
        """
        noise = mean(self.noise)
        batch = self.settings.global_batch_size
        wide = WIDER * batch
        saved = log_slowdown(self.exact, self._train(EXACT, wide))
        ratio = min(exp(saved), MOST_SAVED * WIDER)
        return (ratio - 1.0) / (1.0 / batch - ratio / wide) / noise

    def price_bits(self, free: LogSlowdown) -> LogSlowdown:
        """Try every number of bits at its widest group, all blocks by it; blocks share its price equally.

        Args:
            free: Prices of 0 for the pairs of the space.
        """
        forward = [
            self._share(Candidate(ranks, 1, bits, LOSSLESS))
            for ranks, bits in widest(free.forward_pairs)
        ]
        gradient = [
            self._share(Candidate(1, ranks, LOSSLESS, bits))
            for ranks, bits in widest(free.gradient_pairs)
        ]
        return free.of_pairs(forward, gradient)

    def _share(self, candidate: Candidate) -> float:
        """Return what one block costs in log slowdown where all blocks run a candidate."""
        if candidate.lossless:
            return 0.0
        if candidate not in self.known:
            curves = self._train(candidate, self.settings.global_batch_size)
            self.known[candidate] = log_slowdown(curves, self.exact)
        return self.known[candidate] / self.settings.num_blocks


def widest(pairs: Sequence[Pair]) -> list[Pair]:
    """Replace every pair by that of its bits and the widest group, which stands for all of them."""
    return [max(other for other in pairs if other[1] == bits) for _, bits in pairs]
