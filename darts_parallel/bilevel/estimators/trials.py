"""What few bits cost in steps, tried: short trainings from the initial weights, with paired batches.

A choice is priced by training with it from the start, because weights that learned with nearly exact sums
underrate what a rounding costs, and a mixture's gradient does so even more: at weight p a rounding error e of
mean zero enters the loss as p e, so that its slope is about p e'He and vanishes with p, where the whole step
costs half of e'He. Trials depend neither on the network nor on the logits: one table serves a whole search.

How a trial is read matters as much (experiments.bilevel_estimators): before the blocks contribute anything,
rounding what they send costs nothing, so only the last fifth of a trial counts; and nats become steps by the
exact trial's own curve there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.local_steps import LOCAL, plan_trainer
from darts_parallel.bilevel.measurements import log_delay
from darts_parallel.bilevel.quantize import NEAREST, Pair, Rounding
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import hard
from darts_parallel.bilevel.transformer import Weights, plan_loss
from darts_parallel.config.bilevel import ASYNCHRONOUS
from darts_parallel.cost.collectives import LOSSLESS

READ = 0.8
"""Share of a trial's steps before its losses are compared."""
NEXT_SEED = 10_007
"""Between the seeds of one search's trials."""


@dataclass(frozen=True)
class TrialTable:
    """Costs of lossy collectives used by all blocks.

    Attributes:
        forward: Nats that every lossy `(tp, tp_comm_bits)` is behind the exact trial.
        gradient: Nats that every lossy `(dp, grad_comm_bits)` is behind it.
        forward_log_steps: Log steps that every lossy `(tp, tp_comm_bits)` costs when all blocks sum by it.
        gradient_log_steps: Log steps that every lossy `(dp, grad_comm_bits)` costs.
        way_log_steps: Log steps that every asynchronous pipeline schedule costs, and local SGD.
        steps: Weight steps of all trials together.
    """

    forward: dict[Pair, float]
    gradient: dict[Pair, float]
    forward_log_steps: dict[Pair, float]
    gradient_log_steps: dict[Pair, float]
    way_log_steps: dict[str, float]
    steps: int


def widest(pairs: Sequence[Pair]) -> dict[Pair, Pair]:
    """For every lossy pair the one of its bits and the widest group, which stands for all of them."""
    lossy = [pair for pair in pairs if pair[1] < LOSSLESS]
    return {pair: max(other for other in lossy if other[1] == pair[1]) for pair in lossy}


def train_losses(
    settings: BilevelSettings,
    text: Tensor,
    plan: Sequence[Candidate],
    steps: int,
    seed: int,
    rounding: Rounding = NEAREST,
    way: str = "",
) -> list[float]:
    """Training losses of a plan from scratch, nats, one for each step.

    Args:
        settings: Sizes and learning rate.
        text: Training bytes.
        plan: One candidate for each block.
        steps: Weight steps.
        seed: Of weights and batches: plans of equal seeds see equal batches.
        rounding: How few bits round.
        way: Pipeline schedule, or local SGD.
    """
    rounding = rounding.seeded(seed)
    trainer = plan_trainer(settings, settings.global_batch_size, seed, plan, rounding, way)
    mixtures = [hard(candidate.gradient_pair) for candidate in plan]

    def loss(weights: Weights, tokens: Tensor) -> Tensor:
        return plan_loss(weights, tokens, plan, rounding)

    return [trainer.advance(text, loss, mixtures).loss for _ in range(steps)]


def try_pairs(
    settings: BilevelSettings,
    text: Tensor,
    forward: Sequence[Pair],
    gradient: Sequence[Pair],
    jobs: Jobs,
    rounding: Rounding = NEAREST,
    ways: Sequence[str] = (),
) -> TrialTable:
    """Try every number of bits at its widest group, all blocks by it, and every schedule, on several seeds.

    Args:
        settings: `trial_steps`, `trial_seeds`, sizes and the seed.
        text: Training bytes.
        forward: `(tp, tp_comm_bits)` of the space.
        gradient: `(dp, grad_comm_bits)` of the space.
        jobs: Runs trials side by side.
        rounding: How few bits round.
        ways: Pipeline schedules and local SGD (at the most replicas); what waits costs nothing and is not
            tried.
    """
    sums, sent = widest(forward), widest(gradient)
    plans: dict[tuple[str, Pair], Candidate] = {("exact", (1, LOSSLESS)): Candidate(1, 1)}
    plans |= {("forward", pair): Candidate(pair[0], 1, tp_comm_bits=pair[1]) for pair in sums.values()}
    plans |= {("gradient", pair): Candidate(1, pair[0], grad_comm_bits=pair[1]) for pair in sent.values()}
    steps = settings.trial_steps
    seeds = [settings.seed + NEXT_SEED * index for index in range(settings.trial_seeds)]
    exactly = (Candidate(1, max(dp for dp, _ in gradient)),) * settings.num_blocks
    stale = [way for way in ways if way in ASYNCHRONOUS or way.startswith(LOCAL)]
    arguments = [
        (settings, text, (candidate,) * settings.num_blocks, steps, seed, rounding, "")
        for candidate in plans.values()
        for seed in seeds
    ]
    arguments += [(settings, text, exactly, steps, seed, rounding, way) for way in stale for seed in seeds]
    losses = iter(jobs.map(train_losses, arguments))
    curves = {key: [next(losses) for _ in seeds] for key in plans}
    stale_curves = {way: [next(losses) for _ in seeds] for way in stale}
    exact = curves["exact", (1, LOSSLESS)]
    nats = {key: mean(map(behind, own, exact)) for key, own in curves.items()}
    together = [mean(step) for step in zip(*exact, strict=True)]
    delays = {key: log_delay(together, own, middle_of_read(steps)) for key, own in nats.items()}
    return TrialTable(
        {pair: nats["forward", own] for pair, own in sums.items()},
        {pair: nats["gradient", own] for pair, own in sent.items()},
        {pair: delays["forward", own] for pair, own in sums.items()},
        {pair: delays["gradient", own] for pair, own in sent.items()},
        {
            way: log_delay(together, mean(map(behind, own, exact)), middle_of_read(steps))
            for way, own in stale_curves.items()
        },
        steps * len(arguments),
    )


def behind(curve: Sequence[float], exact: Sequence[float]) -> float:
    """Mean difference of two paired curves over the end that counts, nats."""
    first = _first_read(len(exact))
    return mean(a - b for a, b in zip(curve[first:], exact[first:], strict=True))


def middle_of_read(steps: int) -> float:
    """The step in the middle of a trial's end."""
    return (_first_read(steps) + 1 + steps) / 2


def _first_read(steps: int) -> int:
    return min(int(READ * steps), steps - 1)


@dataclass
class Shares:
    """How much of what lossy collectives cost comes from which block, as moving averages.

    Attributes:
        decay: Of the averages.
        forward: Nats that each block's sums cost by number of bits, `(blocks, bits)`; None before any.
        gradient: Energy of each block's gradient rounding, `(blocks,)`.
    """

    decay: float
    forward: Tensor | None = None
    gradient: Tensor | None = None

    def see_switches(self, nats: Tensor) -> None:
        """Take in one measurement of hard one-layer switches, `(blocks, bits)`."""
        self.forward = nats if self.forward is None else self.decay * self.forward + (1.0 - self.decay) * nats

    def see_rounding(self, energy: Tensor) -> None:
        """Take in the rounding energies of one weight step, `(blocks,)`."""
        own = energy.double() / energy.double().sum().clamp(min=torch.finfo(torch.float64).tiny)
        self.gradient = (
            own if self.gradient is None else self.decay * self.gradient + (1.0 - self.decay) * own
        )

    def of_forward(self, blocks: int, bits: int) -> Tensor:
        """Shares of every number of bits, `(blocks, bits)`, each column summing to 1; equal before any."""
        if self.forward is None:
            return torch.full((blocks, bits), 1.0 / blocks, dtype=torch.float64)
        lost = self.forward.double().clamp(min=0.0)
        total = lost.sum(0, keepdim=True)
        return torch.where(total > 0.0, lost / total.clamp(min=1e-30), 1.0 / blocks)

    def of_gradient(self, blocks: int) -> Tensor:
        """Shares of gradients, `(blocks,)`."""
        if self.gradient is None:
            return torch.full((blocks,), 1.0 / blocks, dtype=torch.float64)
        return self.gradient / self.gradient.sum().clamp(min=1e-30)
