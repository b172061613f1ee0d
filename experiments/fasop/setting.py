"""What FASOP plans for: a job, types of nodes with their links and prices, and its enumerated degrees.

Bandwidths are in bit/s, as the program has them; everything else is in SI units.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_parallel.plan.degrees import divisors

GIB = 2.0**30
LARGEST_TP = 4
"""FASOP has no profile of a higher tensor-parallel degree."""


@dataclass(frozen=True)
class NodeType:
    """A node that can be rented."""

    device: str
    """GPU, as the profile names it, or the part before a bracket."""
    inter_bandwidth: float
    """Bit/s out of the node."""
    intra_bandwidth: float
    """Bit/s inside the node."""
    memory: float
    """Bytes of a GPU that a plan may fill."""
    price_per_hour: float
    """Dollars."""
    shares_bus: bool = False
    """Whether data-parallel groups inside a node share its bandwidth (PCIe)."""
    label: str = ""
    """Name in a plan; the device where empty."""

    @property
    def name(self) -> str:
        """Name in a plan."""
        return self.label or self.device


@dataclass(frozen=True)
class Job:
    """The model, by its name in the profile, and what one step trains on."""

    model: str
    hidden_size: int
    seq_len: int
    vocab_size: int
    num_heads: int
    global_batch_size: int
    num_blocks: int
    """Layers of the chain without the embedding and what follows the last block, or the second embedding."""
    encoder_decoder: bool = False
    """Two equal halves of the chain, each behind its embedding, which are partitioned apart (T5)."""

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return self.num_blocks + 2


@dataclass(frozen=True)
class Offer:
    """Types of nodes, the fastest first; a stage that spans several counts as the last of them."""

    types: tuple[NodeType, ...]
    gpus_per_node: int

    def price_per_second(self, counts: tuple[int, ...]) -> float:
        """Dollars per second of `counts[i]` nodes of type i."""
        pairs = zip(self.types, counts, strict=True)
        return sum(count * kind.price_per_hour for kind, count in pairs) / 3600.0


@dataclass(frozen=True, order=True)
class Degrees:
    """One strategy without its placement and partition; ordered as FASOP tries them."""

    micro_batch_size: int
    tp: int
    dp: int
    pp: int

    def num_micro_batches(self, job: Job) -> int:
        """Micro-batches of one step."""
        return job.global_batch_size // (self.dp * self.micro_batch_size)


def enumerate_degrees(job: Job, gpus_per_node: int, num_nodes: int) -> list[Degrees]:
    """All strategies of `num_nodes` nodes.

    `tp` divides the GPUs of a node, at most `LARGEST_TP`; `tp * dp * pp` is the number of GPUs; `dp` divides
    the global batch and the micro-batch its share; no more stages than blocks.
    """
    gpus = gpus_per_node * num_nodes

    def found() -> Iterator[Degrees]:
        for tp in divisors(min(gpus_per_node, LARGEST_TP)):
            for dp in divisors(gpus // tp):
                pp = gpus // (tp * dp)
                if job.global_batch_size % dp or pp > job.num_blocks:
                    continue
                for size in divisors(job.global_batch_size // dp):
                    yield Degrees(size, tp, dp, pp)

    return sorted(found())


def cyclic_placements(counts: tuple[int, ...]) -> NDArray[np.int64]:
    """FASOP's placements: rotations of the nodes sorted by type, `(rotations, nodes)` of type numbers.

    One type has one placement. Equal rows stay, as in the program.
    """
    nodes = np.repeat(np.arange(len(counts)), counts)
    if np.count_nonzero(counts) == 1:
        return nodes[None, :]
    return np.stack([np.roll(nodes, -shift) for shift in range(len(nodes))])


def count_strategies(job: Job, offer: Offer, counts: tuple[int, ...]) -> int:
    """Strategies that FASOP tries for a cluster, placements included."""
    return len(cyclic_placements(counts)) * len(enumerate_degrees(job, offer.gpus_per_node, sum(counts)))
