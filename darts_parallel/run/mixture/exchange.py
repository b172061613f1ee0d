"""Rows of tokens on their way to the experts and back, each move with its gradient.

An all-to-all over `ep` ranks brings every row to a rank that holds its expert, a gather over `etp` ranks
completes the rows of a split expert; a reduce-scatter and a second all-to-all bring the results back (MoE
Parallel Folding, arXiv 2504.14960, section 3.2). How many rows go where is known only when tokens are
routed, so ranks send unequal numbers, none included.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from darts_parallel.run.layouts import Way, moved


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of this rank's experts; None where there is one rank."""

    between: dist.ProcessGroup | None
    """Ranks that share the experts of a layer among them (`ep`)."""
    within: dist.ProcessGroup | None
    """Ranks that share each expert among them (`etp`)."""

    @property
    def ep(self) -> int:
        """Ranks that share the experts of a layer."""
        return 1 if self.between is None else dist.get_world_size(self.between)

    @property
    def etp(self) -> int:
        """Ranks that share each expert."""
        return 1 if self.within is None else dist.get_world_size(self.within)


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _gathered(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows in the order of the ranks; padded on the way, since gloo gathers equal shapes."""
    longest = max(counts)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _own_sum(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    total = rows.contiguous().clone()
    dist.all_reduce(total, group=group)
    return torch.split(total, counts)[dist.get_rank(group)].contiguous()


class Route:
    """The way of one micro-batch's rows of a layer to the experts that this rank holds, and back.

    Making it is collective over the ranks of both groups.

    Args:
        counts: Rows that this rank sends to each expert of the layer, shape `(E,)`.
        groups: Who holds the experts.
    """

    def __init__(self, counts: Tensor, groups: ExpertGroups) -> None:
        self.groups = groups
        sent = counts.reshape(groups.ep, -1)
        received = sent
        if groups.between is not None:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent.contiguous(), group=groups.between)
        self._sent: list[int] = sent.sum(1).tolist()
        self._received: list[int] = received.sum(1).tolist()
        parts = [received]
        if groups.within is not None:
            parts = [torch.empty_like(received) for _ in range(groups.etp)]
            dist.all_gather(parts, received, group=groups.within)
        self._gathered: list[int] = [int(part.sum()) for part in parts]
        runs = torch.stack(parts)
        """Rows by rank of a split expert, sending rank and expert."""
        self._runs: list[int] = runs.flatten().tolist()
        local = runs.shape[-1]
        # from the order of arrival into that of the experts, whose runs then lie beside each other
        self._order = torch.arange(runs.numel()).reshape(-1, local).T.flatten().tolist()
        self.counts: list[int] = runs.flatten(0, 1).sum(0).tolist()
        """Rows of each expert that this rank holds."""

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows in the order of the layer's experts to rows in the order of this rank's experts."""
        rows = self._exchanged(rows, self._sent, self._received)
        if self.groups.within is not None:
            # gradients are summed, since every rank computes with all rows
            rows = moved(rows, *self._ways_within(_gathered, _own_sum))
        return _reordered(rows, self._runs, self._order)

    def back(self, rows: Tensor) -> Tensor:
        """The other way, partial results of a split expert summed."""
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        rows = _reordered(rows, [self._runs[i] for i in self._order], inverse)
        if self.groups.within is not None:
            rows = moved(rows, *self._ways_within(_own_sum, _gathered))
        return self._exchanged(rows, self._received, self._sent)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        group = self.groups.between
        if group is None:
            return rows
        there = partial(_all_to_all, sent=sent, received=received, group=group)
        return moved(rows, there, partial(_all_to_all, sent=received, received=sent, group=group))

    def _ways_within(self, *ways: Callable[..., Tensor]) -> Iterator[Way]:
        return (partial(way, counts=self._gathered, group=self.groups.within) for way in ways)


def _reordered(rows: Tensor, runs: Sequence[int], order: Sequence[int]) -> Tensor:
    parts = torch.split(rows, list(runs))
    return torch.cat([parts[i] for i in order])
