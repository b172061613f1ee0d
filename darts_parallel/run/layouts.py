"""How activations lie on the ranks of a stage, and differentiable moves between two such layouts.

A micro-batch is divided over the data-parallel ranks along the batch; the ranks of a tensor-parallel
group hold the same copy or, with sequence parallelism, a run of the sequence each. Gradients lie as
their activations do, so that a gather's gradient is a slice and a slice's gradient is a gather.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.run.meshes import Meshes

BATCH, SEQUENCE, VOCABULARY = 0, 1, 2


@dataclass(frozen=True)
class Layout:
    """Tensor-parallel degree, and whether its ranks divide the sequence."""

    tp: int
    sequence_parallel: bool = False

    @staticmethod
    def of(strategy: LayerStrategy) -> "Layout":
        """Layout of what a layer passes on."""
        return Layout(strategy.tp, strategy.sequence_parallel)


Way = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, there: Way, back: Way) -> Tensor:
        context.back = back
        return there(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.back(gradient), None, None


def moved(value: Tensor, there: Way, back: Way) -> Tensor:
    """What `there` makes of a tensor; its gradient goes by `back`."""
    result: Tensor = _Move.apply(value, there, back)  # type: ignore[no-untyped-call]
    return result


def _all_gather(part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def _own_part(whole: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return whole.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def gathered(part: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The parts of all ranks along `dim`; its gradient is this rank's slice."""
    return moved(part, *(partial(way, group=group, dim=dim) for way in (_all_gather, _own_part)))


def sliced(whole: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's part along `dim`; its gradient is gathered from all ranks."""
    return moved(whole, *(partial(way, group=group, dim=dim) for way in (_own_part, _all_gather)))


def converted(state: Tensor, before: Layout, after: Layout, meshes: Meshes) -> Tensor:
    """Activations in another layout.

    Args:
        state: What this rank holds, shape `(b, t, H)`.
        before, after: Layouts of the neighbours.
        meshes: Groups of the plan.
    """
    if before == after:
        return state
    if before.sequence_parallel:
        state = gathered(state, meshes.tensor_group(before.tp), SEQUENCE)
    state = _rebatched(state, before.tp, after.tp, meshes)
    return sliced(state, meshes.tensor_group(after.tp), SEQUENCE) if after.sequence_parallel else state


def _rebatched(state: Tensor, before: int, after: int, meshes: Meshes) -> Tensor:
    """Whole rows of another part of the batch, by way of the smallest common degree."""
    common = lcm(before, after)
    if before != common:
        state = gathered(state, meshes.peers(before, common), BATCH)
    if after != common:
        state = sliced(state, meshes.peers(after, common), BATCH)
    return state


def converted_logits(
    logits: Tensor, before: int, after: int, meshes: Meshes, rows: tuple[int, int]
) -> Tensor:
    """Logits divided along the vocabulary over `before` ranks, divided over `after` ranks instead.

    Args:
        logits: This rank's columns, shape `(b, T, rows / before)`.
        rows: Rows of the vocabulary, padding included, under both degrees.
    """
    if before == after:
        return logits
    if before > 1:
        logits = gathered(logits, meshes.tensor_group(before), VOCABULARY)
    logits = functional.pad(logits, (0, rows[1] - rows[0]))  # a negative pad crops
    logits = _rebatched(logits, before, after, meshes)
    return sliced(logits, meshes.tensor_group(after), VOCABULARY) if after > 1 else logits
