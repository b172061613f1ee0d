"""Ranks of a mesh, and what it costs to bring a tensor from one placement to another."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from darts_parallel.config import LOSSLESS
from darts_parallel.cost import RingGroup, all_reduce, float_tensor, reduce_scatter
from darts_parallel.graph._states import (
    ALL_REDUCE,
    ALL_TO_ALL,
    REPLICATED,
    Ranks,
    State,
    axis_moves,
    collective,
    is_sum,
    local_share,
)
from darts_parallel.problem import Cluster, Device


@dataclass(frozen=True)
class Step:
    """One collective on one axis: its kind and the bytes of the tensor that the group holds together."""

    axis: int
    kind: str
    bytes: float


@dataclass(frozen=True)
class DeviceMeshSpec:
    """Ranks of a mesh and the links below them; the last axis is innermost."""

    ranks: Ranks
    cluster: Cluster

    @property
    def device(self) -> Device:
        """Device of the first node group."""
        return self.cluster.groups[0].device

    @cached_property
    def groups(self) -> tuple[RingGroup, ...]:
        """The groups of every axis."""
        group = self.cluster.groups[0]
        links = group.intra_node, self.cluster.nic(0)
        found = []
        for axis, count in enumerate(self.ranks):
            stride = prod(self.ranks[axis + 1 :])
            local = max(min(count, group.gpus * group.domain_nodes // stride), 1)
            inside, domains, gpus = map(tensor, (local, count // local, group.gpus))
            found.append(RingGroup(inside, domains, gpus, *links))
        return tuple(found)

    def seconds(self, step: Step, messages: float = 1.0) -> float:
        """Return the seconds of a collective by the project's alpha-beta model.

        Args:
            messages: Share of the latencies that it pays.
        """
        group = self.groups[step.axis]
        size = tensor(step.bytes)
        start = messages * float(self.device.collective_start)
        if step.kind == ALL_REDUCE:
            return float(all_reduce(size, group, messages)) + start
        if step.kind == ALL_TO_ALL:  # each rank sends all but one part of its share
            size = size / self.ranks[step.axis]
        return float(reduce_scatter(size, group, messages)) + start / 2.0

    def move_seconds(
        self,
        source: State,
        target: State,
        size: float,
        messages: float = 1.0,
    ) -> float:
        """Return the seconds between placements of a tensor of some bytes, each with its `messages`."""
        steps = self.steps(source, target, size)
        return sum(self.seconds(step, messages) for step in steps)

    def steps(
        self,
        source: State,
        target: State,
        size: float,
    ) -> list[Step]:
        """Return the collectives between placements of a tensor of some bytes, axis by axis."""
        found = []
        now = list(source)
        for axis, old, new in axis_moves(source, target):
            now[axis] = REPLICATED
            if kind := collective(old, new):
                sent = size * _bits(old) / LOSSLESS * local_share(tuple(now), self.ranks)
                found.append(Step(axis, kind, sent))
            now[axis] = new
        return found


def tensor(value: float) -> Tensor:
    """Return a number as the cost model takes it."""
    return float_tensor([value])


def _bits(placement: str) -> int:
    """Return the bits of an element on the wire: a state P4 is reduced with 4."""
    return int(placement[1:] or LOSSLESS) if is_sum(placement) else LOSSLESS
