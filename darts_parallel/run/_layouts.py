"""Process groups of a plan, how activations lie on them, and differentiable moves between two such layouts.

Ranks of a stage follow each other; in a stage tensor-parallel ranks do (Megatron-LM's order, which the
cost model prices). Layers of different tensor-parallel degree have a mesh each over the same ranks.

A micro-batch is divided over the data-parallel ranks along the batch; the ranks of a tensor-parallel
group hold the same copy or, with sequence parallelism, a run of the sequence each. Gradients lie as
their activations do, so that a gather's gradient is a slice and a slice's gradient is a gather.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from darts_parallel.plans import LayerStrategy, Layout, Plan

BATCH = Shard(0)
SEQUENCE = Shard(1)
VOCABULARY = Shard(2)
WHOLE = Replicate()
MeshOf = dict[tuple[int, int], DeviceMesh]
"""Meshes by two degrees."""


class Meshes:
    """All groups of a plan on this rank; making them is collective, in one order on every rank."""

    def __init__(self, plan: Plan, device: str, experts: bool = False) -> None:
        self.rank = dist.get_rank()
        self.pp = plan.pp
        self.stage_size = dist.get_world_size() // plan.pp
        self.stage, self.position = divmod(self.rank, self.stage_size)
        self._device = device
        self._by_division: MeshOf = {}
        """Meshes by tensor-parallel degree and number of shards."""
        for tp, shards in sorted({(layer.tp, layer.shard_ranks()) for layer in plan.layers}):
            replicas = self.stage_size // tp // shards
            self._by_division[tp, shards] = self._mesh(replicate=replicas, shard=shards, tp=tp)
        self._by_experts: MeshOf = {}
        """Meshes by expert-parallel and expert-tensor-parallel degree."""
        for ep, etp in sorted({(layer.ep, layer.etp) for layer in plan.layers if experts}):
            shards = self.stage_size // (ep * etp)
            self._by_experts[ep, etp] = self._mesh(replicate=1, shard=shards, ep=ep, tp=etp)
        self.peers = self._peer_meshes(plan.layers)
        """Ranks with one part of a layer, in batch order, by its degree and that of a common group."""
        # down and up a V, the head lies next to the embedding
        self.tied = self._tied_group() if plan.chunk_devices[-1] > 0 else None

    def _peer_meshes(self, layers: Sequence[LayerStrategy]) -> MeshOf:
        """Make the groups that move activations between neighbours of different degrees."""
        meshes = {}
        for before, after in pairwise(layers):
            common = lcm(before.tp, after.tp)
            for tp in sorted({before.tp, after.tp} - {common}):
                if (tp, common) not in meshes:
                    outer = self.stage_size // common
                    mesh = self._mesh(outer=outer, peer=common // tp, inner=tp)
                    meshes[tp, common] = mesh["peer"]
        return meshes

    def of(self, strategy: LayerStrategy) -> DeviceMesh:
        """Return the mesh that a layer lies on: `pp`, `replicate`, `shard`, `tp`."""
        return self._by_division[strategy.tp, strategy.shard_ranks()]

    def of_experts(self, strategy: LayerStrategy) -> DeviceMesh:
        """Return the mesh of a layer's experts: `pp`, `replicate`, `shard` (edp), `ep`, `tp` (etp)."""
        return self._by_experts[strategy.ep, strategy.etp]

    def tensor(self, tp: int) -> DeviceMesh:
        """Return the ranks that share a layer of this degree and read the same tokens."""
        degrees = next(key for key in self._by_division if key[0] == tp)
        return self._by_division[degrees]["tp"]

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Ranks of the same place in every stage."""
        return next(iter(self._by_division.values()))["pp"].get_group()

    def _mesh(self, **sizes: int) -> DeviceMesh:
        """Make the mesh of all ranks whose dimensions, in this order, have these sizes in every stage."""
        shape = (self.pp, *sizes.values())
        return init_device_mesh(self._device, shape, mesh_dim_names=("pp", *sizes))

    def _tied_group(self) -> dist.ProcessGroup | None:
        """Return this rank's partner and itself, where it lies in the first or the last stage."""
        last = (self.pp - 1) * self.stage_size
        mine = None
        for place in range(self.stage_size):
            group = dist.new_group([place, last + place])
            if self.rank in (place, last + place):
                mine = group
        return mine


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Way = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        value: Tensor,
        there: Way,
        back: Way,
    ) -> Tensor:
        context.back = back
        return there(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.back(gradient), None, None


def moved(value: Tensor, there: Way, back: Way) -> Tensor:
    """Apply `there` to a tensor; its gradient goes by `back`."""
    return _Move.apply(value, there, back)  # type: ignore[no-untyped-call]


def redistributed(
    part: Tensor,
    mesh: DeviceMesh,
    before: Placement,
    after: Placement,
) -> Tensor:
    """Move a tensor over the ranks of a mesh; its gradient lies as it does, so goes the other way."""
    whole = DTensor.from_local(part, mesh, [before], run_check=False)
    return whole.redistribute(placements=[after]).to_local()


def converted(
    state: Tensor,
    before: Layout,
    after: Layout,
    meshes: Meshes,
) -> Tensor:
    """Convert activations to another layout.

    Args:
        state: What this rank holds, shape `(b, t, H)`.
    """
    if before == after:
        return state
    if before.sequence_parallel:
        state = redistributed(state, meshes.tensor(before.tp), SEQUENCE, WHOLE)
    state = _rebatched(state, before.tp, after.tp, meshes)
    if after.sequence_parallel:
        state = redistributed(state, meshes.tensor(after.tp), WHOLE, SEQUENCE)
    return state


def _rebatched(
    state: Tensor,
    before: int,
    after: int,
    meshes: Meshes,
) -> Tensor:
    """Exchange whole rows of the batch, by way of the smallest common degree."""
    common = lcm(before, after)
    if before != common:
        state = redistributed(state, meshes.peers[before, common], BATCH, WHOLE)
    if after != common:
        state = redistributed(state, meshes.peers[after, common], WHOLE, BATCH)
    return state


def converted_logits(
    logits: Tensor,
    before: int,
    after: int,
    meshes: Meshes,
    rows: tuple[int, int],
) -> Tensor:
    """Convert logits divided along the vocabulary over `before` ranks to `after` ranks.

    Args:
        logits: This rank's columns, shape `(b, T, rows / before)`.
    """
    if before == after:
        return logits
    if before > 1:
        logits = redistributed(logits, meshes.tensor(before), VOCABULARY, WHOLE)
    logits = functional.pad(logits, (0, rows[1] - rows[0]))  # a negative pad crops
    logits = _rebatched(logits, before, after, meshes)
    if after > 1:
        logits = redistributed(logits, meshes.tensor(after), WHOLE, VOCABULARY)
    return logits
