"""What lossy communication costs in steps, measured by trying: short trainings from the present weights.

A step along a compressed gradient looks shorter than it is: error feedback delivers the rest a few
steps later. A mixture of roundings looks better than any one of them: their errors average out. So each
number of bits is tried alone, for some steps, on the same batches as 16 bits.
"""

import copy
from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.trainer import WeightTrainer
from darts_parallel.bilevel.transformer import Weights, plan_loss
from darts_parallel.cost.collectives import LOSSLESS

LEAST_SHARE = 0.1
"""Of the exact gradient's progress: a worse measurement counts as this, so that its logarithm exists."""

Pair = tuple[int, int]


def gradient_costs(
    trainer: WeightTrainer,
    plan: Sequence[Candidate],
    text: Tensor,
    pairs: Sequence[Pair],
    steps: int,
    nats_per_efold: float,
) -> dict[Pair, float]:
    """Log of how many times the steps of 16 bits each pair needs, all blocks sending by it.

    The losses of all steps of a trial are averaged: on equal, fresh batches the differences of two
    trials are far less noisy than a loss. A pair that makes the share s of the exact gradient's
    progress is behind it by 1 - s of what the exchange rate expects of these steps.

    Args:
        trainer: Where the trials start from, their batches' generator and residuals included; it is
            not changed.
        plan: How the blocks run forward in all trials.
        text: Training bytes.
        pairs: `(dp, grad_comm_bits)` to try.
        steps: Weight steps of each trial.
        nats_per_efold: Exchange rate.

    Returns:
        By pair; 0 at 16 bits.
    """
    state, done = trainer.state(), max(trainer.step, 1)
    # the first loss of a trial is that of the common start
    expected = nats_per_efold * sum(log((done + i) / done) for i in range(steps)) / steps
    exact = sum(_trial(trainer, state, (1, LOSSLESS), plan, text, steps)) / steps
    costs = {}
    for pair in pairs:
        lossless = pair[1] >= LOSSLESS
        behind = 0.0 if lossless else sum(_trial(trainer, state, pair, plan, text, steps)) / steps - exact
        costs[pair] = -log(max(1.0 - behind / expected, LEAST_SHARE)) if behind else 0.0
    return costs


def sum_costs(
    trainer: WeightTrainer,
    blocks: int,
    text: Tensor,
    pairs: Sequence[Pair],
    steps: int,
    nats_per_efold: float,
) -> dict[Pair, float]:
    """Log of how many times the steps of 16 bits each pair needs, all blocks summing by it.

    Unlike gradients, partial sums stay lossy when the plan is used: the distance between the two losses is
    what has to be trained away. The first half of a trial is left out: there the weights still
    change over from the mixture that they were trained in.

    Args:
        trainer: Where the trials start from; it is not changed.
        blocks: How many there are.
        text: Training bytes.
        pairs: `(tp, tp_comm_bits)` to try.
        steps: Weight steps of each trial.
        nats_per_efold: Exchange rate.

    Returns:
        By pair; 0 at 16 bits.
    """
    state, kept = trainer.state(), slice(steps // 2, None)
    losses: dict[Pair, float] = {}
    for tp, bits in {(tp, LOSSLESS) for tp, bits in pairs if bits < LOSSLESS} | set(pairs):
        plan = [Candidate(tp, 1, tp_comm_bits=bits)] * blocks
        curve = _trial(trainer, state, (1, LOSSLESS), plan, text, steps)[kept]
        losses[tp, bits] = sum(curve) / len(curve)
    return {
        pair: 0.0 if pair[1] >= LOSSLESS else (losses[pair] - losses[pair[0], LOSSLESS]) / nats_per_efold
        for pair in pairs
    }


def _trial(
    trainer: WeightTrainer,
    state: dict[str, Any],
    pair: Pair,
    plan: Sequence[Candidate],
    text: Tensor,
    steps: int,
) -> list[float]:
    """Losses of `steps` from `state` with every block's gradient sent by `pair`, nats."""
    run = WeightTrainer(trainer.settings, trainer.batch, [(pair,)] * len(plan), trainer.seed)
    run.restore(copy.deepcopy(state))
    for reducer in run.reducers:
        reducer.residuals = {key: kept for key, kept in reducer.residuals.items() if key == pair}
    whole = [torch.ones(1)] * len(plan)

    def loss(weights: Weights, tokens: Tensor) -> Tensor:
        return plan_loss(weights, tokens, plan)

    return [run.advance(text, loss, whole).loss for _ in range(steps)]
