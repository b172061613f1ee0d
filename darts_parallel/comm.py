"""Seconds of collectives and point-to-point messages by the alpha-beta model.

Ring collectives: Thakur, Rabenseifner, Gropp 2005 (all-reduce: 2 (n-1)/n bytes over the slowest link
and 2 (n-1) latencies). Groups that cross nodes run hierarchically: inside the node, between nodes,
inside the node. Rings that use a link at the same time share its bandwidth (FASOP, HPDC'24, found
errors of 52-379 % without this term and 0.24-11.5 % with it).
"""

from dataclasses import dataclass

from torch import Tensor

from darts_parallel.cluster import Link, Scalar


@dataclass(frozen=True)
class RingGroup:
    """The shape of equal groups that communicate at the same time; tensors of shape `(C,)`."""

    local: Tensor
    """Ranks of one group on one node."""
    nodes: Tensor
    """Nodes that one group crosses."""
    gpus: Tensor
    """GPUs of a node that communicate at once: `gpus / local` groups inside it, and `gpus` rings
    over its link to the others."""


def reduce_scatter(size: Tensor, group: RingGroup, intra: Link, inter: Link) -> Tensor:
    """Seconds to reduce-scatter, or to all-gather, a tensor over a group.

    Args:
        size: Bytes of the full tensor, shape broadcastable to `(..., C)`.
        group: Shape of the groups, `(C,)`.
        intra: Link inside a node, per GPU unless shared.
        inter: Link between nodes, per node.

    Returns:
        Seconds, shape of `size`.
    """
    d, n = group.local, group.nodes
    rings_inside = group.gpus / d if intra.shared else 1.0
    inside = (d - 1) / d * size * rings_inside / intra.bandwidth + (d - 1) * intra.latency
    across = (n - 1) / n * (size / d) * group.gpus / inter.bandwidth + (n - 1) * inter.latency
    return inside + across


def all_reduce(size: Tensor, group: RingGroup, intra: Link, inter: Link) -> Tensor:
    """Seconds to all-reduce a tensor of `size` bytes: a reduce-scatter and an all-gather."""
    return 2.0 * reduce_scatter(size, group, intra, inter)


def p2p(size: Tensor, senders: int, link: Link, *, inside_node: bool) -> Tensor:
    """Seconds of one message of `size` bytes from each of `senders` GPUs of a node."""
    sharing: Scalar = senders if link.shared or not inside_node else 1
    return size * sharing / link.bandwidth + link.latency
