"""How trainers pack the sequences of a step into micro-batches, emulated from Megatron-LM's rules.

The rules are those of `megatron/core/datasets/data_schedule.py` and
`megatron/core/datasets/data_schedule_utils.py` in Megatron-LM's branch `dev` at d48bd6be
(megatron-core 0.19.0), without interleaved stages.
`tests/planner/test_sequence_packing.py` compares 1,000 batches with that code.

- `dp_balanced`: packing at a fixed context-parallel degree (cp).
- `default_dynamic_cp`: every sequence gets the ranks that its length needs, a power of two. Groups of any
  size follow the same rules (Megatron-LM's PR 6801 in its own words; its code was not at hand).
- `padded`: no packing, all sequences of a micro-batch are as long as its longest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from darts_parallel.config import DYNAMIC, PACKED


class Group(NamedTuple):
    """Neighbouring ranks that share their sequences in one micro-batch."""

    ranks: int
    """Context-parallel degree of the sequences."""
    sequences: tuple[int, ...]
    """Numbers of the sequences in the batch."""


Wave = list[Group]
"""One micro-batch of all ranks, in order of ranks."""


def padded(
    lengths: Sequence[int],
    dp: int,
    cp: int,
    size: int,
) -> list[Wave]:
    """Return micro-batches of `size` sequences, rank after rank; each is as often its longest one."""
    rows = np.arange(len(lengths)).reshape(-1, dp, size)
    longest = np.take_along_axis(rows, np.asarray(lengths)[rows].argmax(2)[:, :, None], 2)
    return [[Group(cp, (number,) * size) for number in row] for row in longest[:, :, 0].tolist()]


def dp_balanced(
    lengths: Sequence[int],
    dp: int,
    cp: int,
    budget: int,
) -> list[Wave]:
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
    """Tokens of a rank."""
    work: float = 0.0
    """Work of a rank: squared lengths over ranks."""


@dataclass
class _OpenWave:
    """A micro-batch that still takes sequences."""

    free: int
    """Ranks without a group."""
    budget: int
    any_size: bool
    """Whether groups have any number of ranks, else powers of two."""
    busiest: float = 0.0
    """Work of the busiest rank."""
    groups: list[_Open] = field(default_factory=list)
    """In order of ranks."""
    by_ranks: dict[int, list[_Open]] = field(default_factory=lambda: defaultdict(list))

    def place(
        self,
        number: int,
        length: int,
        ranks: int,
    ) -> bool:
        """Add a sequence where the busiest rank stays least busy; return whether there is a place.

        Megatron-LM also limits the work of a rank to 1.05 times `budget` tokens of the longest
        sequence. No rank reaches that: its sequences are no longer, and have at most `budget` tokens.

        Args:
            ranks: Ranks of the smallest group that holds the sequence.
        """
        best = None
        least = inf
        for own in self._places(length, ranks):
            work = max(self.busiest, own.work + length * length / own.ranks)
            if work < least:
                best = own
                least = work
            if work == self.busiest:
                break
        if best is not None:
            self.add(best, number, length)
        return best is not None

    def _places(self, length: int, ranks: int) -> Iterator[_Open]:
        """Yield the groups with room for a sequence, and new ones, smaller ones first."""
        while ranks <= max(self.free, *self.by_ranks):
            tokens = length / ranks
            for own in self.by_ranks.get(ranks, ()):
                if own.tokens + tokens <= self.budget:
                    yield own
            if ranks <= self.free:
                yield _Open(ranks)
            ranks += self._step(ranks)

    def _step(self, ranks: int) -> int:
        """Return the ranks that the next larger group has more."""
        return 1 if self.any_size else ranks

    def add(
        self,
        group: _Open,
        number: int,
        length: int,
    ) -> None:
        """Give a sequence to a group, which may be new."""
        if not group.sequences:
            self.groups.append(group)
            self.by_ranks[group.ranks].append(group)
            self.free -= group.ranks
        group.sequences.append(number)
        group.tokens += length / group.ranks
        group.work += length * length / group.ranks
        self.busiest = max(self.busiest, group.work)

    def closed(self) -> Wave:
        """Enlarge the first of the smallest groups until no rank is idle, and return the groups."""
        while self.free:
            smallest = min(self.groups, key=lambda own: own.ranks)
            step = self._step(smallest.ranks)
            self.free -= step
            smallest.ranks += step
        return [Group(own.ranks, tuple(own.sequences)) for own in self.groups]


def default_dynamic_cp(
    lengths: Sequence[int],
    ranks: int,
    budget: int,
    min_cp: int = 1,
    *,
    any_size: bool = False,
) -> list[Wave]:
    """Form micro-batches of groups of ranks, the longest sequences first.

    Args:
        lengths: None above `budget * ranks` tokens.
        ranks: Ranks of data and context parallelism together.
        budget: Tokens of a rank (`--max-seqlen-per-dp-cp-rank`).
        min_cp: Smallest group (`--min-dynamic-context-parallel-size`).
        any_size: False: all groups, `ranks` and `min_cp` are powers of two.
    """
    left = defaultdict(list)
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        left[lengths[number]].append(number)
    waves = []
    while left:
        longest = next(iter(left))
        wave = _OpenWave(ranks, budget, any_size)
        size = needed(longest, budget, min_cp, any_size=any_size)
        wave.add(_Open(size), left[longest].pop(0), longest)
        for length, numbers in left.items():
            least = needed(length, budget, min_cp, any_size=any_size)
            # an equal sequence finds no place where the one before found none
            while numbers and wave.place(numbers[0], length, least):
                numbers.pop(0)
        waves.append(wave.closed())
        for length in [length for length, numbers in left.items() if not numbers]:
            del left[length]
    return waves


def needed(
    length: int,
    budget: int,
    min_cp: int,
    *,
    any_size: bool = False,
) -> int:
    """Return the fewest ranks that hold a sequence, at least `min_cp`."""
    ranks = ceil(length / budget)
    if not any_size:
        ranks = 1 << (ranks - 1).bit_length()
    return max(min_cp, ranks)


class Packing(NamedTuple):
    """How sequences become micro-batches."""

    scheduler: str
    """A member of `PACKINGS`."""
    cp: int
    """Context-parallel degree; with dynamic context parallelism, of the launch alone."""
    micro_batch_size: int = 1
    """Sequences of a padded micro-batch."""
    budget: int = 0
    """Tokens of a rank in a packed micro-batch."""
    min_cp: int = 1
    """Smallest group of dynamic context parallelism."""
    any_size: bool = False
    """Whether its groups have any size, else powers of two."""

    def tokens(self, longest: int) -> float:
        """Return the tokens of a rank in its fullest micro-batch."""
        return self.budget or longest * self.micro_batch_size / self.cp

    def function(self, ranks: int) -> Callable[[list[int]], list[Wave]]:
        """Return the function that packs the lengths of a step on some ranks."""
        if self.scheduler == DYNAMIC:
            return partial(
                default_dynamic_cp,
                ranks=ranks,
                budget=self.budget,
                min_cp=self.min_cp,
                any_size=self.any_size,
            )
        dp = ranks // self.cp
        if self.scheduler == PACKED:
            return partial(dp_balanced, dp=dp, cp=self.cp, budget=self.budget)
        return partial(padded, dp=dp, cp=self.cp, size=self.micro_batch_size)

    @property
    def settings(self) -> "Packing":
        """The packing without the degree of a dynamic launch, on which no micro-batch depends."""
        return self._replace(cp=1) if self.scheduler == DYNAMIC else self
