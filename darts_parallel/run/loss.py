"""Cross-entropy on logits whose vocabulary is divided over tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.problem.problem import Problem


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, targets: Tensor, valid: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        first = group.rank() * logits.shape[-1] if group else 0
        columns = first + torch.arange(logits.shape[-1], device=logits.device)
        logits = logits.float().masked_fill(columns >= valid, -torch.inf)
        largest = _reduced(logits.amax(-1), dist.ReduceOp.MAX, group)
        powers = (logits - largest.unsqueeze(-1)).exp_()
        total = _reduced(powers.sum(-1), dist.ReduceOp.SUM, group)
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        index = (targets - first).masked_fill(~mine, 0).unsqueeze(-1)
        picked = logits.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)
        picked = _reduced(picked, dist.ReduceOp.SUM, group)
        context.save_for_backward(powers.div_(total.unsqueeze(-1)), index, mine)
        return (total.log() + largest - picked).sum()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares, index, mine = context.saved_tensors
        result = shares.scatter_add(-1, index, -mine.to(shares.dtype).unsqueeze(-1))
        return result * gradients[0], None, None, None


def _reduced(values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(values, operation, group)
    return values


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, valid: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Summed cross-entropy, nats; equal on all ranks of the group.

    As Megatron-LM's vocabulary-parallel loss (Shoeybi et al. 2019, arXiv 1909.08053, section 3), which
    never gathers the logits; columns beyond the vocabulary count as impossible.

    Args:
        logits: This rank's columns, shape `(b, T, V / tp)`.
        targets: Shape `(b, T)`.
        valid: Size of the vocabulary; columns from there on are padding.
        group: Ranks that hold the other columns, in order; None: there are none.
    """
    total: Tensor = _CrossEntropy.apply(logits, targets, valid, group)  # type: ignore[no-untyped-call]
    return total


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
