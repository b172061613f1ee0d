"""Cross-entropy on logits whose vocabulary is divided over tensor-parallel ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from darts_parallel.problem import Problem
from darts_parallel.run._layouts import redistributed


def cross_entropy_sum(logits: Tensor, targets: Tensor, valid: int, mesh: DeviceMesh | None = None) -> Tensor:
    """Return the summed cross-entropy, nats; equal on all ranks of the mesh.

    As Megatron-LM's vocabulary-parallel loss (Shoeybi et al. 2019, arXiv 1909.08053, section 3), which
    never gathers the logits; columns beyond the vocabulary count as impossible.

    Args:
        logits: This rank's columns, shape `(b, T, V / tp)`.
        targets: Shape `(b, T)`.
        valid: Size of the vocabulary; columns from there on are padding.
        mesh: Ranks that hold the other columns, in order; None: there are none.
    """
    first = mesh.get_local_rank() * logits.shape[-1] if mesh else 0
    columns = first + torch.arange(logits.shape[-1], device=logits.device)
    logits = logits.float().masked_fill(columns >= valid, -torch.inf)
    largest = logits.detach().amax(-1)
    if mesh is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    index = (targets - first).masked_fill(~mine, 0).unsqueeze(-1)
    picked = logits.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)
    total = (logits - largest.unsqueeze(-1)).exp().sum(-1)
    if mesh is not None:  # every rank goes on with the sums, whose gradient is that of each part
        total, picked = (redistributed(part, mesh, Partial(), Replicate()) for part in (total, picked))
    return (total.log() + largest - picked).sum()


def global_batch(problem: Problem, seed: int, step: int) -> Tensor:
    """Draw the tokens of one optimizer step, shape `(global batch, seq_len + 1)`: inputs and targets."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    shape = (problem.training.global_batch_size, problem.training.seq_len + 1)
    return torch.randint(problem.model.config.vocab_size, shape, generator=generator)


def part_of_rank(batch: Tensor, num_micro_batches: int, dp: int, index: int) -> Tensor:
    """Return what data-parallel rank `index` of `dp` reads, one micro-batch after the other.

    Every micro-batch is a contiguous run of the global batch, and a rank has a contiguous run of
    every micro-batch: layers of different `dp` then see the same micro-batches.

    Args:
        batch: Shape `(B, ...)`.
    """
    parts = torch.unflatten(batch, 0, (num_micro_batches, dp, -1))
    return parts[:, index].flatten(0, 1)
