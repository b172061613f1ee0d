"""How trainers pack the sequences of a step into micro-batches, emulated from Megatron-LM's rules.

The rules are those of `megatron/core/datasets/data_schedule.py` and `data_schedule_utils.py` in
Megatron-LM's branch `dev` at d48bd6be (megatron-core 0.19.0), without interleaved stages.
`tests/planner/test_sequence_packing.py` compares 1,000 batches with that code.

- `dp_balanced`: packing at a fixed context-parallel degree (cp).
- `default_dynamic_cp`: every sequence gets the ranks that its length needs.
- `padded`: no packing, all sequences of a micro-batch are as long as its longest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import numpy as np

WORK_MARGIN = 1.05
"""Work of a rank in a micro-batch, relative to full ranks of sequences as long as the longest one."""


class Group(NamedTuple):
    """Neighbouring ranks that share their sequences in one micro-batch."""

    ranks: int
    """Context-parallel degree of the sequences."""
    sequences: tuple[int, ...]
    """Numbers of the sequences in the batch."""


Wave = list[Group]
"""One micro-batch of all ranks, in order of ranks."""


def padded(lengths: Sequence[int], dp: int, cp: int, size: int) -> list[Wave]:
    """Return micro-batches of `size` sequences, rank after rank; each is as often its longest one."""
    rows = np.arange(len(lengths)).reshape(-1, dp, size)
    longest = np.take_along_axis(rows, np.asarray(lengths)[rows].argmax(2)[:, :, None], 2)
    return [[Group(cp, (number,) * size) for number in row] for row in longest[:, :, 0].tolist()]


def dp_balanced(lengths: Sequence[int], dp: int, cp: int, budget: int) -> list[Wave]:
    """Pack sequences in their order, up to `budget` tokens a rank.

    Single sequences then leave the last packs, until the packs are a multiple of `dp`.

    Args:
        lengths: Of a batch of at least `dp` sequences, none above `budget * cp` tokens.
    """
    packs: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not packs or length > room:
            packs.append([])
            room = budget * cp
        packs[-1].append(number)
        room -= length
    last = len(packs) - 1
    while len(packs) % dp:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
        else:
            last -= 1
    groups = [Group(cp, tuple(pack)) for pack in packs]
    return [groups[first : first + dp] for first in range(0, len(groups), dp)]


@dataclass
class _Open:
    """A group that still takes sequences."""

    ranks: int
    sequences: list[int] = field(default_factory=list)
    tokens: float = 0.0
    """Of a rank."""
    work: float = 0.0
    """Of a rank: squared lengths over ranks."""

    def add(self, number: int, length: int) -> None:
        """Give the group a sequence."""
        self.sequences.append(number)
        self.tokens += length / self.ranks
        self.work += length * length / self.ranks


@dataclass
class _OpenWave:
    """A micro-batch that still takes sequences."""

    ranks: int
    budget: int
    most_work: float
    """Most work of a rank."""
    groups: list[_Open] = field(default_factory=list)
    """In order of ranks."""

    def place(self, number: int, length: int, size: int) -> bool:
        """Add a sequence where the busiest rank stays least busy; return whether there is a place.

        Args:
            size: Smallest group that the sequence needs.
        """
        best = None
        busiest = max(own.work for own in self.groups)
        least = self.most_work
        for own in self._places(length, size):
            work = max(busiest, own.work + length * length / own.ranks)
            if work < least or (best is None and work == least):
                best, least = own, work
            if work == busiest:
                break
        if best is None:
            return False
        if not best.sequences:
            self.groups.append(best)
        best.add(number, length)
        return True

    def _places(self, length: int, size: int) -> Iterator[_Open]:
        """Yield the groups with room for a sequence, and new ones, smaller ones first."""
        free = self.ranks - sum(own.ranks for own in self.groups)
        while size <= self.ranks:
            for own in self.groups:
                if own.ranks == size and own.tokens + length / size <= self.budget:
                    yield own
            if size <= free:
                yield _Open(size)
            size *= 2

    def widen(self) -> None:
        """Double the first of the smallest groups until no rank is idle."""
        while sum(own.ranks for own in self.groups) < self.ranks:
            smallest = min(self.groups, key=lambda own: own.ranks)
            smallest.ranks *= 2


def default_dynamic_cp(
    lengths: Sequence[int], ranks: int, budget: int, min_cp: int = 1
) -> list[Wave]:
    """Form micro-batches of groups of ranks, the longest sequences first.

    Args:
        lengths: None above `budget * ranks` tokens.
        ranks: Ranks of data and context parallelism together, a power of two.
        budget: Tokens of a rank (`--max-seqlen-per-dp-cp-rank`).
        min_cp: Smallest group, a power of two (`--min-dynamic-context-parallel-size`).
    """
    needed = {}
    for length in set(lengths):
        needed[length] = max(min_cp, 1 << (ceil(length / budget) - 1).bit_length())
    left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    waves = []
    while left:
        first, *others = left
        longest = lengths[first]
        group = _Open(needed[longest])
        group.add(first, longest)
        wave = _OpenWave(ranks, budget, longest * budget * WORK_MARGIN, [group])
        left = []
        refused = 0
        for number in others:
            length = lengths[number]
            # nothing has changed since an equal sequence found no place
            if length != refused and wave.place(number, length, needed[length]):
                refused = 0
            else:
                refused = length
                left.append(number)
        wave.widen()
        waves.append([Group(own.ranks, tuple(own.sequences)) for own in wave.groups])
    return waves
