"""Seconds of collectives and point-to-point messages by the alpha-beta model; one collective, one function.

Bytes are priced as in ring collectives: an all-reduce moves 2 (n-1)/n of the tensor over the
slowest link (Thakur, Rabenseifner, Gropp 2005). Latencies are priced as in trees: 2 log2 n hops,
which NCCL takes where latencies count (double binary trees; NVLS in an NVLink domain). The smaller
of two algorithms' times would not be convex in the logarithms of bandwidth and latency, as
`darts_parallel.design` needs it; the sum is.

Groups that cross nodes run hierarchically: inside the node, between nodes, inside the node. Where
one NVLink switch joins several nodes (GB200 NVL72), these nodes count as one. Rings that use a link
at the same time share its bandwidth (FASOP, HPDC'24: errors of 52-379 % without this term and
0.24-11.5 % with it).

A new collective is a function here, and a call where its bytes are known: `layer_costs.py`,
`sharding.py`, `_transitions.py` or a file of `terms/`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from darts_parallel.config import LOSSLESS, CostConfig
from darts_parallel.problem import Link, Scalar

BLOCK = CostConfig.lossy_block
"""Numbers that share one scale in a lossy collective where nothing else is said."""
SCALE_BITS = 16
"""Bits of the scale of a block."""


def wire_bytes(width: float, bits: Tensor, block: int = BLOCK) -> Tensor:
    """Return the bytes on the wire per number of a tensor, shape of `bits`.

    Args:
        width: Bytes of one number in memory.
    """
    with_scale = bits.double() + SCALE_BITS / block
    lossy = with_scale / 8.0
    return torch.where(bits >= LOSSLESS, float(width), lossy)


@dataclass(frozen=True)
class RingGroup:
    """Equal groups that communicate at the same time; tensors of shape `(C,)`."""

    local: Tensor
    """Ranks of one group on one node, or in one NVLink domain of several nodes."""
    nodes: Tensor
    """Nodes (NVLink domains) that one group crosses."""
    gpus: Tensor
    """GPUs of a node that communicate at once: `gpus / local` groups inside it, and `gpus` rings
    over its link to the others."""
    intra: Link
    """Link inside a node, per GPU unless shared."""
    inter: Link
    """Link between nodes, per node."""

    @cached_property
    def rates(self) -> tuple[Tensor, Tensor]:
        """Seconds a byte, and the latency, to reduce-scatter over the group, each `(C,)`."""
        local = self.local
        nodes = self.nodes
        rings_inside = self.gpus / local if self.intra.shared else 1.0
        inside = (local - 1) / local * rings_inside / self.intra.towards(local - 1)
        across = (nodes - 1) / nodes / local * self.gpus / self.inter.bandwidth
        latency = torch.log2(local) * self.intra.latency + torch.log2(nodes) * self.inter.latency
        return inside + across, latency


def split_group(group: RingGroup, ranks: Tensor, inner: Tensor) -> tuple[RingGroup, RingGroup]:
    """Return groups divided in two levels: neighbouring ranks, and ranks with the same index among them.

    Args:
        ranks: Sizes of the groups, `(C,)`.
        inner: Ranks of an inner group, divisors of `ranks`, `(C,)`; they fill a node first.

    Returns:
        The inner and the outer groups.
    """
    whole = inner == ranks
    common = torch.gcd(inner.long(), group.local.long()).to(ranks.dtype)
    local = torch.where(whole, group.local, common)
    nodes = torch.where(whole, group.nodes, inner / local)
    outer_local = torch.where(whole, 1.0, group.local / local)
    outer_nodes = (ranks / inner / outer_local).clamp(min=1.0)
    inner_group = replace(group, local=local, nodes=nodes)
    outer_group = replace(group, local=outer_local, nodes=outer_nodes)
    return inner_group, outer_group


def single_ring(group: RingGroup, where: Tensor) -> RingGroup:
    """Return groups that cross nodes as one ring: all bytes leave a node by one adapter, `(C,)`.

    Args:
        where: Strategies whose groups do so; the others keep their shape.
    """
    crossing = where & (group.nodes > 1)
    return replace(group, local=torch.where(crossing, 1.0, group.local))


def reduce_scatter(size: Tensor, group: RingGroup, messages: Scalar = 1.0) -> Tensor:
    """Return the seconds to reduce-scatter, or to all-gather, a tensor over a group.

    Args:
        size: Bytes of the full tensor, shape broadcastable to `(..., C)`.
        messages: Share of the latencies that the tensor pays; tensors of one bucket share a message.

    Returns:
        Seconds, shape of `size`.
    """
    per_byte, latency = group.rates
    return size * per_byte + messages * latency


def all_reduce(size: Tensor, group: RingGroup, messages: Scalar = 1.0) -> Tensor:
    """Return the seconds to all-reduce a tensor of `size` bytes: a reduce-scatter and an all-gather."""
    return 2.0 * reduce_scatter(size, group, messages)


def all_to_all(inside: Tensor, across: Tensor, group: RingGroup, share: Scalar = 1.0) -> Tensor:
    """Return the seconds of an all-to-all, whose messages inside and between nodes travel at once.

    Args:
        inside: Bytes that a rank sends to other ranks of its node, broadcastable to `(..., C)`.
        across: Bytes that a rank sends to other nodes.
        share: Share of the links' bandwidth that all-to-alls reach.
    """
    intra = group.intra
    inter = group.inter
    sharing: Tensor | float = group.gpus if intra.shared else 1.0
    within = inside * sharing / (intra.towards(group.local - 1) * share)
    within = within + (group.local > 1).double() * intra.latency
    between = across * group.gpus / (inter.bandwidth * share)
    between = between + (group.nodes > 1).double() * inter.latency
    return torch.maximum(within, between)


def p2p(
    size: Tensor,
    senders: int,
    link: Link,
    *,
    inside_node: bool,
) -> Tensor:
    """Return the seconds of one message of `size` bytes from each of `senders` GPUs of a node."""
    sharing: Scalar = senders if link.shared or not inside_node else 1
    bandwidth = link.towards(torch.ones(())) if inside_node else link.bandwidth
    return size * sharing / bandwidth + link.latency
