"""Collectives and messages over a process group, and the alpha-beta figures that fit them best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log2

import numpy as np
import torch
from scipy.optimize import nnls
from torch import distributed

from darts_parallel.machine._timing import MeasuredMachine

SMALLEST = 2**10
"""Bytes of the smallest message; each further one is four times as large."""
MOST_SIZES = 16
"""Sizes of messages that are tried, at most."""


@dataclass(frozen=True)
class MessageTime:
    """One measured collective or message."""

    operation: str
    size: int
    """Bytes of the full tensor."""
    traffic: float
    """Bytes through the slowest link by `cost/collectives.py`."""
    steps: float
    """Latencies by `cost/collectives.py`."""
    seconds: float = 0.0


@dataclass(frozen=True)
class LinkProfile:
    """A link's figures and what they follow from."""

    times: tuple[MessageTime, ...]
    bandwidth: float
    """Bytes/s, one direction."""
    latency: float
    """Seconds."""
    error: float
    """Median of |fitted / measured - 1|."""


Case = tuple[MessageTime, Callable[[], object]]
"""A collective or message that is to be timed, and how to run it."""


def measure_link(
    machine: MeasuredMachine, *, inside: bool, largest: int, seconds: float
) -> LinkProfile | None:
    """Time all-reduce, all-gather and messages inside nodes, or between them.

    Args:
        inside: Inside the nodes; else between them, all ranks of a node at once.
        largest: Bytes of the largest message.

    Returns:
        None where such a group has one rank.
    """
    ranks = torch.arange(machine.world).view(machine.nodes, machine.ranks_per_node)
    groups = ranks if inside else ranks.T
    if groups.shape[1] == 1:
        return None
    # every rank takes part in making all groups; torch returns the rank's own first
    group, _ = distributed.new_subgroups_by_enumeration(groups.tolist())  # type: ignore[no-untyped-call]
    # all ranks of a node send at once between nodes, and share what leaves it
    sharing = 1 if inside else machine.ranks_per_node
    cases = []
    for power in range(MOST_SIZES):
        size = SMALLEST * 4**power
        if size <= max(largest, SMALLEST):
            cases += _cases(machine, group, size, sharing)
    name = "links inside nodes" if inside else "links between nodes"
    spent = machine.measure(name, [work for _, work in cases], seconds)
    pairs = zip(cases, spent, strict=True)
    return fit_link([replace(case, seconds=took) for (case, _), took in pairs])


def fit_link(times: Sequence[MessageTime]) -> LinkProfile:
    """Fit bandwidth and latency by least squares on relative errors, both above zero.

    Every time is `traffic / bandwidth + steps * latency`; neither figure may be negative.
    """
    seconds = np.array([t.seconds for t in times])
    rows = np.array([[t.traffic, t.steps] for t in times]) / seconds[:, None]
    (inverse, latency), _ = nnls(rows, np.ones(len(times)))
    if inverse == 0.0:
        # nothing grew with size: the largest message bounds the bandwidth from below
        inverse = min(t.seconds / t.traffic for t in times)
    error = np.median(np.abs(rows @ [inverse, latency] - 1.0))
    return LinkProfile(tuple(times), 1.0 / float(inverse), float(latency), float(error))


def _cases(
    machine: MeasuredMachine, group: distributed.ProcessGroup, size: int, sharing: int
) -> list[Case]:
    """List an all-reduce, an all-gather, and a message there and back, of `size` bytes.

    Args:
        sharing: Ranks that send through one link at once.
    """
    ranks = distributed.get_process_group_ranks(group)
    count = max(size // 4 // len(ranks), 1)
    whole = torch.ones(count * len(ranks), device=machine.device)
    mine = torch.ones(count, device=machine.device)
    parts = [torch.ones_like(mine) for _ in ranks]
    place = ranks.index(machine.rank)
    moves = [distributed.send, distributed.recv]
    if place % 2:
        moves.reverse()

    def there_and_back() -> None:
        # neighbours in pairs, all pairs at once; a last rank without a partner waits
        if place ^ 1 < len(ranks):
            for move in moves:
                move(whole, ranks[place ^ 1], group=group)

    ring = (len(ranks) - 1) / len(ranks) * size * sharing
    steps = log2(len(ranks))
    all_reduce = partial(distributed.all_reduce, whole, group=group)
    all_gather = partial(distributed.all_gather, parts, mine, group=group)
    reduced = MessageTime("all-reduce", size, 2.0 * ring, 2.0 * steps)
    gathered = MessageTime("all-gather", size, ring, steps)
    exchanged = MessageTime("there and back", size, 2.0 * size * sharing, 2.0)
    return [(reduced, all_reduce), (gathered, all_gather), (exchanged, there_and_back)]
