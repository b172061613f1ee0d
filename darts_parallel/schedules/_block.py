"""One building block, repeated every six passes (Qi et al. 2024, arXiv 2405.15362, section 3).

How fast a micro-batch goes down and up the V decides how long it is kept, hence the memory.

The authors' schedules follow these rules, and so does this file:
- The gradients of the weights take the slots that the block leaves free.
- Every pass moves to the earliest free slot after its input, as if all passes took equal seconds.
  No device then holds more than the fullest device held before.
- After its last forward pass a device runs its backward passes as early as possible.
"""

from collections import deque
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_parallel.schedules._folded import Folded, Step, Steps
from darts_parallel.schedules._searched import Pass, source

Counts = NDArray[np.int64]
Key = tuple[str, int]
"""Kind and stage of passes."""
INTERVAL = 6
"""Passes of one micro-batch on a device: forward, backward and weights of two stages."""
CHANGE = {"F": 1, "B": 0, "W": -1}
"""Change, by kind of pass, of the number of micro-batches whose activations a device keeps."""


class Gaps(NamedTuple):
    """Passes between neighbouring devices, by direction along the V."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


class BuildingBlock(Folded):
    """A schedule by its block: when each pass of the first micro-batch runs."""

    gaps: Gaps
    turnaround: int
    """Passes between the two halves of the backward on the last device."""
    loss_wait: int
    """Passes that the loss waits where a device would have two passes at once."""
    clashing: int
    """Numbers of devices with that wait are the multiples of this one."""

    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Read the passes of all devices, which are placed together."""
        yield from _placed(self, pp, count)[device]

    def starts(self, device: int, pp: int) -> dict[Key, int]:
        """Return when a device runs the first micro-batch, in passes."""
        last = pp - 1
        bottom = last * self.gaps.forward_down + 1
        waits = 0 if pp % self.clashing else self.loss_wait
        loss = bottom + last * self.gaps.forward_up + 1 + waits
        turn = loss + last * self.gaps.backward_down + self.turnaround
        below = last - device
        upper = pp + below
        starts = {("F", device): device * self.gaps.forward_down}
        starts["F", upper] = bottom + below * self.gaps.forward_up
        starts["B", upper] = loss + device * self.gaps.backward_down
        starts["B", device] = turn + below * self.gaps.backward_up
        return starts


Row = dict[int, Pass]
"""Passes of a device by slot."""


class Slots:
    """The passes of every device by slot, and the slot of every pass."""

    def __init__(self, pp: int) -> None:
        self.rows: list[Row] = [{} for _ in range(pp)]
        self.ended: dict[Pass | None, int] = {}

    def put(self, device: int, slot: int, entry: Pass) -> None:
        """Run a pass in a slot of its device."""
        self.rows[device][slot] = entry
        self.ended[entry] = slot

    def ready(self, entry: Pass) -> int:
        """Return the slot after which a pass has its input and the previous micro-batch has run."""
        kind, stage, batch = entry
        num_stages = 2 * len(self.rows)
        given = source(kind, stage, batch, num_stages, "B")
        before = self.ended.get((kind, stage, batch - 1), -1)
        return max(before, self.ended.get(given, -1))


@lru_cache(maxsize=8)
def _placed(schedule: BuildingBlock, pp: int, count: int) -> tuple[tuple[Step, ...], ...]:
    """Repeat the block, then move its passes together where it leaves slots free."""
    slots = repeated(schedule, pp, count)
    rows = slots.rows
    move_together(slots, [held(row) for row in rows], [-1] * pp)
    last_forward = [_last_forward(row) for row in rows]
    # gradients of weights leave the drain, and return where its backward passes leave slots free
    drained = []
    for row, end in zip(rows, last_forward, strict=True):
        drained.append(_take_weights(row, end))
    move_together(slots, None, last_forward)
    for device, entries in enumerate(drained):
        for entry in entries:
            time = max(slots.ready(entry), last_forward[device]) + 1
            while time in rows[device]:
                time += 1
            slots.put(device, time, entry)
    orders = []
    for row in rows:
        passes = [row[time] for time in sorted(row)]
        orders.append(tuple((kind, int(stage >= pp), batch) for kind, stage, batch in passes))
    return tuple(orders)


def _last_forward(row: Row) -> int:
    return max(time for time, (kind, _, _) in row.items() if kind == "F")


def _take_weights(row: Row, end: int) -> list[Pass]:
    """Remove the gradients of the weights that run after a slot."""
    late = [time for time in sorted(row) if time > end and row[time][0] == "W"]
    return [row.pop(time) for time in late]


def repeated(schedule: BuildingBlock, pp: int, count: int) -> Slots:
    """Repeat the block to the end; gradients of the weights take the slots that it leaves free."""
    slots = Slots(pp)
    for device in range(pp):
        for (kind, stage), first in schedule.starts(device, pp).items():
            for batch in range(count):
                slots.put(device, first + INTERVAL * batch, (kind, stage, batch))
        # free slots take the gradients of the weights, in the order of their backward passes
        row = slots.rows[device]
        waiting = deque[Pass]()
        time = min(row)
        left = 2 * count
        while left:
            kind, stage, batch = row.get(time, ("", 0, 0))
            if not kind and waiting:
                slots.put(device, time, waiting.popleft())
                left -= 1
            elif kind == "B":
                waiting.append(("W", stage, batch))
            time += 1
    return slots


def held(row: Row) -> Counts:
    """Count the micro-batches that a device keeps after each slot, from forward pass to weights."""
    changes = np.zeros(max(row) + 1, dtype=np.int64)
    for time, (kind, _, _) in row.items():
        changes[time] = CHANGE[kind]
    return np.cumsum(changes)


def move_together(slots: Slots, counts: list[Counts] | None, after: list[int]) -> None:
    """Move passes in the order of their slots, each to the earliest free one at which it can run.

    Args:
        slots: Changed in place, like `counts`.
        counts: Micro-batches that devices keep by slot; moves keep the largest. None: no limit.
        after: Slot of every device after which passes move.
    """
    most = max(int(row.max()) for row in counts) if counts else 0
    end = max(map(max, slots.rows)) + 1
    free = np.ones((len(slots.rows), end), dtype=bool)
    for device, row in enumerate(slots.rows):
        free[device, list(row)] = False
    for now in range(end):
        for device, row in enumerate(slots.rows):
            if free[device, now] or now <= after[device]:
                continue
            entry = row[now]
            kind = entry[0]
            first = max(slots.ready(entry), after[device]) + 1
            open_slots = free[device, first:now].copy()
            if counts and kind == "F":
                # up to the last slot at which the device is full
                (full,) = np.nonzero(counts[device][first:now] >= most)
                if len(full):
                    open_slots[: full[-1] + 1] = False
            if not open_slots.any():
                continue
            slot = first + int(open_slots.argmax())
            if counts and kind != "B":
                counts[device][slot:now] += CHANGE[kind]
            del row[now]
            slots.put(device, slot, entry)
            free[device, now] = True
            free[device, slot] = False
