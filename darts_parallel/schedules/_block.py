"""One building block, repeated every six passes (Qi et al. 2024, arXiv 2405.15362, section 3).

How fast a micro-batch goes down and up the V decides how long it is kept, hence the memory. As in the
authors' schedules: weights take the slots that the block leaves free; every pass moves to the earliest free
slot behind its input, by passes of equal seconds, while no device holds more than any does without; behind
its last forward pass a device runs its backward passes as early as they can.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from darts_parallel.schedules._folded import Folded, Step

Counts = NDArray[np.int64]
Ends = dict[tuple[str, int], list[int]]
"""Slots of the passes of a kind and stage by micro-batch."""
INTERVAL = 6
"""Passes of one micro-batch on a device: forward, backward and weights of two stages."""
CHANGE = {"F": 1, "B": 0, "W": -1}
"""Passes more that a device holds what backward needs of, by kind."""


class BuildingBlock(Folded):
    """A schedule by its block: when each pass of the first micro-batch runs."""

    gaps: tuple[int, int, int, int]
    """Passes between neighbours: forward down and up, backward down and up the V."""
    turn: int
    """Passes between the two halves of the backward on the last device."""

    @abstractmethod
    def loss_waits(self, pp: int) -> int:
        """Return the passes that the loss waits where a device would have two passes at once."""

    def steps(self, device: int, pp: int, count: int) -> Iterator[Step]:
        """Read the passes of all devices, which are placed together."""
        yield from _placed(self, pp, count)[device]

    def starts(self, device: int, pp: int) -> dict[tuple[str, int], int]:
        """Return when a device runs the first micro-batch, in passes."""
        down, up, back_down, back_up = self.gaps
        far = pp - 1 - device
        bottom = (pp - 1) * down + 1
        top = bottom + (pp - 1) * up + 1 + self.loss_waits(pp)
        again = top + (pp - 1) * back_down + self.turn
        forward = {("F", 0): device * down, ("F", 1): bottom + far * up}
        return forward | {("B", 1): top + device * back_down, ("B", 0): again + far * back_up}


class Series:
    """The passes of a kind and a stage, in the order of micro-batches."""

    def __init__(self, kind: str, half: int, ended: list[int], given: list[int] | None) -> None:
        self.kind, self.half = kind, half
        self.ended = ended
        """Their slots."""
        self.given = given
        """Those of the passes that give their input; None: there is none."""

    def ready(self, batch: int) -> int:
        """Return the slot behind which a pass has its input and the micro-batch before has run."""
        before = self.ended[batch - 1] if batch else -1
        return before if self.given is None else max(before, self.given[batch])


Slots = list[dict[int, tuple[Series, int]]]
"""Series and micro-batch of every pass, by its slot, of every device."""


@lru_cache(maxsize=8)
def _placed(schedule: BuildingBlock, pp: int, count: int) -> tuple[tuple[Step, ...], ...]:
    """Repeat the block, then move its passes together where it leaves slots free."""
    slots = repeated(schedule, pp, count)
    move_together(slots, [held(row) for row in slots], [-1] * pp)
    last = [max(time for time, (series, _) in row.items() if series.kind == "F") for row in slots]
    # weights leave the drain, and come back where its backward passes leave slots free
    ends = zip(slots, last, strict=True)
    drained = [
        [row.pop(t) for t in sorted(row) if t > end and row[t][0].kind == "W"] for row, end in ends
    ]
    move_together(slots, None, last)
    for row, entries, end in zip(slots, drained, last, strict=True):
        for series, batch in entries:
            time = max(series.ready(batch), end) + 1
            while time in row:
                time += 1
            row[time], series.ended[batch] = (series, batch), time
    rows = ([row[time] for time in sorted(row)] for row in slots)
    return tuple(tuple((series.kind, series.half, batch) for series, batch in row) for row in rows)


def _series(device: int, ended: Ends, pp: int) -> dict[tuple[str, int], Series]:
    """Return the passes of a device by kind and half of the V."""
    last, found = 2 * pp - 1, {}
    for half, stage in enumerate((device, last - device)):
        before = ended["F", stage - 1] if stage else None
        behind = ended["F", last] if stage == last else ended["B", stage + 1]
        for kind, given in (("F", before), ("B", behind), ("W", ended["B", stage])):
            found[kind, half] = Series(kind, half, ended[kind, stage], given)
    return found


def repeated(schedule: BuildingBlock, pp: int, count: int) -> Slots:
    """Repeat the block to the end, weights in the slots that it leaves free."""
    ended: Ends = {(kind, stage): [0] * count for kind in "FBW" for stage in range(2 * pp)}
    slots: Slots = [{} for _ in range(pp)]
    for device, row in enumerate(slots):
        mine = _series(device, ended, pp)
        for key, first in schedule.starts(device, pp).items():
            series = mine[key]
            series.ended[:] = times = range(first, first + INTERVAL * count, INTERVAL)
            row.update((time, (series, batch)) for batch, time in enumerate(times))
        waiting, time, left = deque[tuple[Series, int]](), min(row), 2 * count
        while left:
            entry = row.get(time)
            if entry is None and waiting:
                series, batch = row[time] = waiting.popleft()
                series.ended[batch] = time
                left -= 1
            elif entry is not None and entry[0].kind == "B":
                waiting.append((mine["W", entry[0].half], entry[1]))
            time += 1
    return slots


def held(row: dict[int, tuple[Series, int]]) -> Counts:
    """Count the passes that a device holds behind each of its slots, from their forward to their weights."""
    return np.cumsum(
        [CHANGE[row[time][0].kind] if time in row else 0 for time in range(max(row) + 1)]
    )


def move_together(slots: Slots, counts: list[Counts] | None, after: list[int]) -> None:
    """Move passes in the order of their slots, each to the earliest free one at which it can run.

    Args:
        slots: Are changed, and so are `counts`.
        counts: Passes that devices hold by slot, of which none may exceed the largest; None: no limit.
        after: Slot of every device behind which passes move.
    """
    most = max(int(row.max()) for row in counts) if counts else 0
    end = max(map(max, slots)) + 1
    free = np.array([[time not in row for time in range(end)] for row in slots])
    for now in range(end):
        for device, row in enumerate(slots):
            if free[device, now] or now <= after[device]:
                continue
            series, batch = entry = row[now]
            first = max(series.ready(batch), after[device]) + 1
            open_slots = free[device, first:now].copy()
            if counts and series.kind == "F":
                (full,) = (counts[device][first:now] >= most).nonzero()
                open_slots[: full[-1] + 1 if len(full) else 0] = False
            if not open_slots.any():
                continue
            slot = first + int(open_slots.argmax())
            if counts and series.kind != "B":
                counts[device][slot:now] += CHANGE[series.kind]
            del row[now]
            row[slot], series.ended[batch] = entry, slot
            free[device, now], free[device, slot] = True, False
