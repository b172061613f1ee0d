"""Collectives and messages over a process group, and the alpha-beta figures that fit them best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

import torch
from torch import Tensor, distributed

from darts_parallel.machine._timing import MeasuredMachine

SMALLEST = 2**10
"""Bytes of the smallest message; each further one is four times as large."""


@dataclass(frozen=True)
class MessageTime:
    """One measured collective or message."""

    operation: str
    size: int
    """Bytes of the full tensor."""
    seconds: float
    traffic: float
    """Bytes through the slowest link by `comm.py`."""
    steps: float
    """Latencies by `comm.py`."""


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


def measure_link(
    machine: MeasuredMachine, *, inside: bool, largest: int, seconds: float
) -> LinkProfile | None:
    """Time all-reduce, all-gather and messages between the ranks of a node, or of equal place on all nodes.

    Args:
        inside: Inside the nodes; else between them, all ranks of a node at once.
        largest: Bytes of the largest message.

    Returns:
        None where such a group has one rank.
    """
    ranks = machine.ranks_per_node if inside else machine.nodes
    if ranks == 1:
        return None
    group, members = _my_group(machine, inside=inside)
    # all ranks of a node send at once between nodes, and share what leaves it
    sharing = 1 if inside else machine.ranks_per_node
    sizes = [SMALLEST * 4**i for i in range(16) if SMALLEST * 4**i <= max(largest, SMALLEST)]
    named: list[tuple[str, int, float, float]] = []
    works: list[Callable[[], object]] = []
    for size in sizes:
        ring, steps = (ranks - 1) / ranks * size * sharing, log2(ranks)
        named += [
            ("all-reduce", size, 2 * ring, 2 * steps),
            ("all-gather", size, ring, steps),
            ("there and back", size, 2.0 * size * sharing, 2.0),
        ]
        works += _works(machine, group, members, size)
    times = machine.measure(
        "links inside nodes" if inside else "links between nodes", works, seconds
    )
    return fit_link(
        [
            MessageTime(name, size, spent, traffic, steps)
            for (name, size, traffic, steps), spent in zip(named, times, strict=True)
        ]
    )


def fit_link(times: Sequence[MessageTime]) -> LinkProfile:
    """Fit bandwidth and latency by least squares on relative errors, both above zero.

    Every time is `traffic / bandwidth + steps * latency`; the two are found from its normal equations, or one
    of them alone where the other would be negative.
    """
    rows = torch.tensor(
        [[t.traffic / t.seconds, t.steps / t.seconds] for t in times], dtype=torch.float64
    )
    one = torch.ones(len(times), dtype=torch.float64)
    inverse, latency = torch.linalg.lstsq(rows, one).solution.tolist()
    if latency < 0:
        inverse, latency = _alone(rows[:, 0]), 0.0
    elif inverse <= 0:
        # nothing grew with size: the largest message bounds the bandwidth from below
        inverse = min(t.seconds / t.traffic for t in times)
        latency = _alone(rows[:, 1])
    fitted = rows @ torch.tensor([inverse, latency], dtype=torch.float64)
    return LinkProfile(tuple(times), 1.0 / inverse, latency, median((fitted - 1.0).abs().tolist()))


def _alone(column: Tensor) -> float:
    return float(column.sum() / column.square().sum())


def _my_group(
    machine: MeasuredMachine, *, inside: bool
) -> tuple[distributed.ProcessGroup, list[int]]:
    """Return this rank's group, and its ranks; every rank takes part in making all groups."""
    size = machine.ranks_per_node
    groups = [list(range(node * size, (node + 1) * size)) for node in range(machine.nodes)]
    if not inside:
        groups = [list(ranks) for ranks in zip(*groups, strict=True)]
    made = [distributed.new_group(ranks) for ranks in groups]
    mine = next(i for i, ranks in enumerate(groups) if machine.rank in ranks)
    return made[mine], groups[mine]


def _works(
    machine: MeasuredMachine, group: distributed.ProcessGroup, members: list[int], size: int
) -> list[Callable[[], object]]:
    """Return an all-reduce, an all-gather and a message to a neighbour and back, each of `size` bytes."""
    count = max(size // 4 // len(members), 1)
    whole = torch.ones(count * len(members), device=machine.device)
    parts = [torch.ones(count, device=machine.device) for _ in members]
    mine = torch.ones(count, device=machine.device)
    place = members.index(machine.rank)

    def there_and_back() -> None:
        # neighbors in pairs, all pairs at once; a last rank without a partner waits
        if place ^ 1 < len(members):
            for move in (distributed.send, distributed.recv)[:: -1 if place % 2 else 1]:
                move(whole, members[place ^ 1], group=group)

    return [
        lambda: distributed.all_reduce(whole, group=group),
        lambda: distributed.all_gather(parts, mine, group=group),
        there_and_back,
    ]
