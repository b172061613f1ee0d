"""States of tensors on the axes of a mesh, and what it costs to bring a tensor from one to another."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from darts_parallel.cost import LOSSLESS, RingGroup, all_reduce, reduce_scatter
from darts_parallel.graph._rules import PARTIAL, REPLICATED, SLICED, VARYING
from darts_parallel.problem import Cluster, Device, Link

State = tuple[str, ...]
"""A state on every axis of the mesh."""
ALL_REDUCE, ALL_GATHER = "all_reduce", "all_gather"
REDUCE_SCATTER, ALL_TO_ALL = "reduce_scatter", "all_to_all"


def forward_state(state: State) -> State:
    """Return the placements of a tensor on all axes: `S0`, `R` or `P`."""
    return tuple(REPLICATED if one.startswith(VARYING) else one for one in state)


def gradient_state(state: State) -> State:
    """Return the placements of its gradient: that of a sum is whole, that of a shared input is a sum."""
    own = (
        PARTIAL if s.startswith(VARYING) else REPLICATED if s.startswith(PARTIAL) else s
        for s in state
    )
    return tuple(own)


def collective(source: str, target: str) -> str | None:
    """Return the collective from one placement to another; None where every rank has what it needs."""
    if source in (target, REPLICATED) or (target == PARTIAL and source.startswith("S")):
        return None  # a slice, or a rank's share of a sum
    if source.startswith(PARTIAL):
        return REDUCE_SCATTER if target.startswith("S") else ALL_REDUCE
    return ALL_GATHER if target == REPLICATED else ALL_TO_ALL


def local_shape(shape: tuple[int, ...], state: State, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor."""
    sizes = list(shape)
    for one, count in zip(state, ranks, strict=True):
        if one.startswith("S"):
            sizes[int(one[1:])] //= count
    return tuple(sizes)


def local_share(state: State, ranks: tuple[int, ...]) -> float:
    """Return the part of a tensor that a rank holds for backward."""
    split = (
        count
        for one, count in zip(state, ranks, strict=True)
        if one.startswith("S") or one == SLICED
    )
    return 1.0 / prod(split)


def axis_moves(source: State, target: State) -> list[tuple[int, str, str]]:
    """Return the moves from one placement to another, axis by axis: axis, old and new placement.

    Where two axes split one dimension the later one splits the parts of the earlier one, which may therefore
    not change meanwhile; where neither order of two axes does so, an axis is made whole before.
    """
    axes = [axis for axis in range(len(source)) if source[axis] != target[axis]]
    for order in (axes, axes[::-1]):
        now, moves = list(source), []
        for axis in order:
            old, now[axis] = now[axis], target[axis]
            moves.append((axis, old, target[axis]))
            if {old, target[axis]} & {one for one in now[axis + 1 :] if one.startswith("S")}:
                break
        else:
            return moves
    first = axes[0] if len(axes) > 1 and source[axes[1]] != source[axes[0]] else len(source) - 1
    middle = (*source[:first], REPLICATED, *source[first + 1 :])
    return [(first, source[first], REPLICATED), *axis_moves(middle, target)]


def divides(shape: tuple[int, ...], state: State, ranks: tuple[int, ...]) -> bool:
    """Return whether all axes that split a dimension divide it evenly."""
    shares = dict.fromkeys(state, 1)
    for one, count in zip(state, ranks, strict=True):
        shares[one] *= count
    return all(
        shape[int(one[1:])] % count == 0 for one, count in shares.items() if one.startswith("S")
    )


@dataclass(frozen=True)
class Step:
    """One collective on one axis: its kind and the bytes of the tensor that the group holds together."""

    axis: int
    kind: str
    bytes: float


@dataclass(frozen=True)
class DeviceMeshSpec:
    """Ranks of a mesh and the links below them; the last axis is innermost."""

    ranks: tuple[int, ...]
    cluster: Cluster

    @property
    def device(self) -> Device:
        """Device of the first node group."""
        return self.cluster.groups[0].device

    @cached_property
    def links(self) -> tuple[Link, Link]:
        """Links inside a node and between nodes."""
        return self.cluster.groups[0].intra_node, self.cluster.nic(0)

    @cached_property
    def groups(self) -> tuple[RingGroup, ...]:
        """The shape of every axis's groups."""
        group = self.cluster.groups[0]
        domain = group.gpus * group.domain_nodes
        found = []
        for axis, count in enumerate(self.ranks):
            stride = prod(self.ranks[axis + 1 :])
            local = max(min(count, domain // stride), 1)
            shape = [float(local), float(count // local), float(group.gpus)]
            found.append(RingGroup(*(torch.tensor([x], dtype=torch.float64) for x in shape)))
        return tuple(found)

    def seconds(self, step: Step) -> float:
        """Return the seconds of a collective by the project's alpha-beta model."""
        group = self.groups[step.axis]
        size = torch.tensor([step.bytes], dtype=torch.float64)
        if step.kind == ALL_REDUCE:
            return float(all_reduce(size, group, *self.links))
        if step.kind == ALL_TO_ALL:  # each rank sends all but one part of what it holds
            size = size / self.ranks[step.axis]
        return float(reduce_scatter(size, group, *self.links))

    def steps(self, source: State, target: State, size: float) -> list[Step]:
        """Return the collectives between placements of a tensor of some bytes, axis by axis."""
        found, now = [], list(source)
        for axis, old, new in axis_moves(source, target):
            now[axis] = REPLICATED
            if (kind := collective(old, new)) is not None:
                bits = (
                    int(old.removeprefix(PARTIAL) or LOSSLESS)
                    if old.startswith(PARTIAL)
                    else LOSSLESS
                )
                sent = size * bits / LOSSLESS
                found.append(Step(axis, kind, sent * local_share(tuple(now), self.ranks)))
            now[axis] = new
        return found
