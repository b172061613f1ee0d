"""Seconds of collectives and point-to-point messages by the alpha-beta model.

Bytes as of ring collectives (Thakur, Rabenseifner, Gropp 2005: an all-reduce moves 2 (n-1)/n of them over the
slowest link), latencies as of trees: 2 log2 n hops, which NCCL takes where latencies count (double binary
trees; NVLS in an NVLink domain). The smaller of two algorithms' times would not be convex in the logarithms
of bandwidth and latency, on which `darts_parallel.design` relies; a sum is. Groups that cross nodes run
hierarchically: inside the node, between nodes, inside the node; where one NVLink switch joins several nodes
(GB200 NVL72), all of them are the inside. Rings that use a link at the same time share its bandwidth (FASOP,
HPDC'24, found errors of 52-379 % without this term and 0.24-11.5 % with it).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from darts_parallel.config import CostConfig
from darts_parallel.problem import Link, Scalar

LOSSLESS = 16
"""Bits from which on a tensor travels as it is."""
BLOCK = CostConfig.lossy_block
"""Numbers that share one scale in a lossy collective where nothing else is said."""
SCALE_BITS = 16


def wire_bytes(width: float, bits: Tensor, block: int = BLOCK) -> Tensor:
    """Return the bytes on the wire per number of a tensor, shape of `bits`.

    Args:
        width: Bytes of one number in memory.
    """
    return torch.where(bits >= LOSSLESS, float(width), (bits.double() + SCALE_BITS / block) / 8.0)


@dataclass(frozen=True)
class RingGroup:
    """The shape of equal groups that communicate at the same time; tensors of shape `(C,)`."""

    local: Tensor
    """Ranks of one group on one node, or in one NVLink domain of several nodes."""
    nodes: Tensor
    """Nodes (NVLink domains) that one group crosses."""
    gpus: Tensor
    """GPUs of a node that communicate at once: `gpus / local` groups inside it, and `gpus` rings
    over its link to the others."""


def split_group(group: RingGroup, ranks: Tensor, inner: Tensor) -> tuple[RingGroup, RingGroup]:
    """Return the groups divided in two levels: neighbouring ranks, and the ranks of equal place among them.

    Args:
        ranks: Their sizes, `(C,)`.
        inner: Ranks of an inner group, divisors of `ranks`, `(C,)`; they fill a node first.

    Returns:
        The inner and the outer groups.
    """
    one, whole = torch.ones_like(ranks), inner == ranks
    local = torch.where(
        whole, group.local, torch.gcd(inner.long(), group.local.long()).to(ranks.dtype)
    )
    nodes = torch.where(whole, group.nodes, inner / local)
    outer_local = torch.where(whole, one, group.local / local)
    outer = replace(group, local=outer_local, nodes=(ranks / inner / outer_local).clamp(min=1.0))
    return replace(group, local=local, nodes=nodes), outer


def single_ring(group: RingGroup, where: Tensor) -> RingGroup:
    """Return groups that cross nodes as one ring: all bytes leave a node by one adapter, `(C,)`.

    Args:
        where: Strategies whose groups do so; the others keep their shape.
    """
    crossing = where & (group.nodes > 1)
    return replace(group, local=torch.where(crossing, 1.0, group.local))


def reduce_scatter(
    size: Tensor, group: RingGroup, intra: Link, inter: Link, messages: Scalar = 1.0
) -> Tensor:
    """Return the seconds to reduce-scatter, or to all-gather, a tensor over a group.

    Args:
        size: Bytes of the full tensor, shape broadcastable to `(..., C)`.
        intra: Link inside a node, per GPU unless shared.
        inter: Link between nodes, per node.
        messages: Share of the latencies that the tensor pays: several of one bucket travel as one message.

    Returns:
        Seconds, shape of `size`.
    """
    d, n = group.local, group.nodes
    rings_inside = group.gpus / d if intra.shared else 1.0
    inside = (d - 1) / d * size * rings_inside / intra.towards(d - 1)
    across = (n - 1) / n * (size / d) * group.gpus / inter.bandwidth
    latency = torch.log2(d) * intra.latency + torch.log2(n) * inter.latency
    return inside + across + messages * latency


def all_reduce(
    size: Tensor, group: RingGroup, intra: Link, inter: Link, messages: Scalar = 1.0
) -> Tensor:
    """Return the seconds to all-reduce a tensor of `size` bytes: a reduce-scatter and an all-gather."""
    return 2.0 * reduce_scatter(size, group, intra, inter, messages)


def p2p(size: Tensor, senders: int, link: Link, *, inside_node: bool) -> Tensor:
    """Return the seconds of one message of `size` bytes from each of `senders` GPUs of a node."""
    sharing: Scalar = senders if link.shared or not inside_node else 1
    bandwidth = link.towards(torch.ones(())) if inside_node else link.bandwidth
    return size * sharing / bandwidth + link.latency
