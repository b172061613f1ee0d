"""Training tokens that every process draws alike, and the part of them that a rank reads."""

import torch
from torch import Tensor

from darts_parallel.problem import Problem


def global_batch(problem: Problem, seed: int, step: int) -> Tensor:
    """Random tokens of one optimizer step, shape `(global batch, seq_len + 1)`: inputs and targets."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    shape = (problem.training.global_batch_size, problem.training.seq_len + 1)
    return torch.randint(problem.model.config.vocab_size, shape, generator=generator)


def part_of_rank(batch: Tensor, num_micro_batches: int, dp: int, index: int) -> Tensor:
    """What data-parallel rank `index` of `dp` reads, its micro-batches one after the other.

    Every micro-batch is a contiguous run of the global batch, and a rank has a contiguous run of
    every micro-batch: layers of different `dp` then see the same micro-batches.

    Args:
        batch: Shape `(B, ...)`.
    """
    parts = torch.unflatten(batch, 0, (num_micro_batches, dp, -1))
    return parts[:, index].flatten(0, 1)
