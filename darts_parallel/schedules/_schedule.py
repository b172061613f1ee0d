"""A schedule: what it is called, where its stages lie, and the passes of every device in their order."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from darts_parallel.errors import UnsupportedError

FILLS = 3
"""Micro-batches a device behind which no device holds more; a simulation begins with as many."""
Moment = tuple[int, int]
"""Micro-batches before their backward pass, and between it and their weights' gradient."""


SEARCHED = "searched"
"""Name of the orders that no rule writes."""
PLACEMENTS = ("loop", "v")


class Operation(NamedTuple):
    """One pass of one micro-batch through one stage; `Schedule.devices` names its device."""

    kind: str
    """`F` forward, `B` backward (of the input alone in a split schedule), `W` gradient of the weights."""
    stage: int
    """In the order of layers, from 0 to `pp * chunks - 1`."""
    micro_batch: int


class Schedule(ABC):
    """The order of the passes of a pipeline. Equal arguments give equal passes."""

    name: str
    aliases: tuple[str, ...] = ()
    pytorch: str | None = None
    """Its name in `torch.distributed.pipelining`; None: PyTorch runs it by the CSV of its passes."""
    chunks: int | None = 1
    """Stages of a device; None: any number above 1."""
    kinds = "FBW"
    """Its kinds of passes; whole backward passes next to split ones come last."""
    split = False
    """Backward passes leave the gradient of the weights to a pass of its own."""
    folded = False
    """Stages lie as a V: device k holds the stages k and `2 * pp - 1 - k`."""
    repeats = True
    """A frame of passes may be put in for more micro-batches, so that a steady state is looked for."""
    linear = False
    """Each micro-batch after the second adds the same seconds, so that no steady state is looked for."""

    @abstractmethod
    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Yield the passes of a device in the order in which it runs them.

        Args:
            device: From 0 to `pp - 1`.
            pp: Devices in the pipeline.
            count: Micro-batches.
            chunks: Stages of each device.
        """

    def devices(self, pp: int, num_stages: int) -> tuple[int, ...]:
        """Return the device of every stage: in turn, or down and up a V."""
        if self.folded:
            return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
        return tuple(stage % pp for stage in range(num_stages))

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Return what a number of micro-batches must be, in words, and the closest valid number."""
        return "at least 1", max(count, 1)

    def frame_batches(self, pp: int) -> int:
        """Return the micro-batches of a frame, the passes that every device repeats."""
        return 1

    def longest_period(self, pp: int) -> int:
        """Return after how many frames a steady state is looked for: a loop through all stages holds one."""
        return 2 * pp if self.folded else pp

    def in_flight(self, pp: int, count: int, chunks: int) -> tuple[int, ...]:
        """Return the micro-batches whose activations every stage holds when its device holds most."""
        return _held(self, pp, min(count, FILLS * pp), chunks)

    def last_stage_moments(self, pp: int, count: int, chunks: int) -> tuple[Moment, ...]:
        """Return every moment at which the last stage may hold most."""
        return _last_stage_moments(self, pp, min(count, FILLS * pp), chunks)

    def fullest_moments(self, pp: int, count: int, chunks: int) -> tuple[tuple[float, float], ...]:
        """Return the moments at which a device may hold most, if passes grow with their backward.

        As `Moment`, each a share of the passes that the device is said to hold.
        """
        return _fullest_moments(self, pp, min(count, FILLS * pp), chunks)

    @property
    def splits(self) -> bool:
        """Whether some backward pass comes in two parts."""
        return self.split

    def chunk_refusal(self, chunks: int) -> str | None:
        """Say in one sentence why a device cannot hold so many stages; None where it can."""
        if chunks == self.chunks or (self.chunks is None and chunks > 1):
            return None
        return (
            f"plan: virtual_stages={chunks} must be {self.chunks or 'above 1'} with the schedule "
            f"{self.name}; try {self.chunks or 2}."
        )

    def count_refusal(self, pp: int, count: int) -> str | None:
        """Say in one sentence why the schedule is not defined for these numbers; None where it is."""
        rule, near = self.count_rule(pp, count)
        return (
            None
            if near == count
            else f"plan: num_micro_batches={count} must be {rule}; try {near}."
        )

    def orders(self, pp: int, count: int, chunks: int = 1) -> tuple[tuple[Operation, ...], ...]:
        """Return the passes of every device.

        Errors:
            UnsupportedError: the schedule is not defined for these numbers.
        """
        if sentence := self.chunk_refusal(chunks) or self.count_refusal(pp, count):
            raise UnsupportedError(sentence)
        return tuple(tuple(self.passes(device, pp, count, chunks)) for device in range(pp))

    def code(self, pp: int, count: int, chunks: int = 1) -> str:
        """Return the passes as the code of a searched order (`Searched`)."""
        names = {"B": "I"} if self.split and len(self.kinds) == 3 else {}
        rows = [
            " ".join(f"{stage}{names.get(kind, kind)}{batch}" for kind, stage, batch in order)
            for order in self.orders(pp, count, chunks)
        ]
        return ";".join([f"{SEARCHED}:{PLACEMENTS[self.folded]}", *rows])


@lru_cache(maxsize=256)
def _held(schedule: Schedule, pp: int, count: int, chunks: int) -> tuple[int, ...]:
    """Count `Schedule.in_flight`: from a forward pass to the last backward one of its micro-batch."""
    result, last = [0] * (pp * chunks), "W" if schedule.split else "B"
    devices = schedule.devices(pp, pp * chunks)
    for device, order in enumerate(schedule.orders(pp, count, chunks)):
        mine = [stage for stage in range(pp * chunks) if devices[stage] == device]
        held = dict.fromkeys(mine, 0)
        # ties go to the moment with more of the earlier stages, which hold them longer
        most = (0, *(0 for _ in mine))
        for kind, stage, _ in order:
            held[stage] += (kind == "F") - (kind == last)
            most = max(most, (sum(held.values()), *held.values()))
        for stage, number in zip(mine, most[1:], strict=True):
            result[stage] = number
    return tuple(result)


@lru_cache(maxsize=256)
def _last_stage_moments(schedule: Schedule, pp: int, count: int, chunks: int) -> tuple[Moment, ...]:
    last = pp * chunks - 1
    order = schedule.orders(pp, count, chunks)[schedule.devices(pp, last + 1)[-1]]
    before, between, moments = 0, 0, {(0, 0)}
    for kind, stage, _ in order:
        if stage == last:
            before += {"F": 1, "B": -1, "W": 0}[kind]
            between += {"F": 0, "B": 1, "W": -1}[kind]
            moments.add((before, between))
    return tuple(sorted(moments))


@lru_cache(maxsize=256)
def _fullest_moments(
    schedule: Schedule, pp: int, count: int, chunks: int
) -> tuple[tuple[float, float], ...]:
    """Count `Schedule.fullest_moments` that no other one exceeds in all and between the passes."""
    seen: set[tuple[float, float]] = set()
    for order in schedule.orders(pp, count, chunks):
        kinds = np.array([kind for kind, _, _ in order])
        forward, backward, weights = (np.cumsum(kinds == kind) for kind in "FBW")
        held, late = forward - weights, backward - weights
        seen.update(zip((held / held.max()).tolist(), (late / held.max()).tolist(), strict=True))
    kept: list[tuple[float, float]] = []
    for held, late in sorted(seen, reverse=True):
        if not kept or late > kept[-1][1]:
            kept.append((held - late, late))
    return tuple(kept)
