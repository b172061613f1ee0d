"""One building block, repeated every six passes (Qi et al. 2024, arXiv 2405.15362, section 3).

How fast a micro-batch goes down and up the V decides how long it is kept, hence the memory.

The authors' schedules follow these rules, and so does this file:
- The gradients of the weights take the slots that the block leaves free.
- Every pass moves to the earliest free slot after its input, as if all passes took equal seconds.
  No device then holds more than the fullest device held before.
- After its last forward pass a device runs its backward passes as early as possible.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_parallel.schedules._folded import Folded, Step, Steps

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


@dataclass(eq=False)
class Series:
    """The passes of a kind and a stage, in the order of micro-batches."""

    kind: str
    stage: int
    half: int
    ended: list[int]
    """Slots of the passes."""
    inputs: "Series | None" = None
    """Passes that give the input of these."""


class Placed(NamedTuple):
    """The pass of one micro-batch."""

    series: Series
    batch: int

    @property
    def kind(self) -> str:
        """Kind of the pass."""
        return self.series.kind

    @property
    def ready(self) -> int:
        """Slot after which the pass has its input and the previous micro-batch has run."""
        before = self.series.ended[self.batch - 1] if self.batch else -1
        inputs = self.series.inputs
        if inputs is None:
            return before
        return max(before, inputs.ended[self.batch])

    def put(self, row: "Row", slot: int) -> None:
        """Run the pass in a slot of its device."""
        row[slot] = self
        self.series.ended[self.batch] = slot


Row = dict[int, Placed]
"""Passes of a device by slot."""


@lru_cache(maxsize=8)
def _placed(schedule: BuildingBlock, pp: int, count: int) -> tuple[tuple[Step, ...], ...]:
    """Repeat the block, then move its passes together where it leaves slots free."""
    slots = repeated(schedule, pp, count)
    move_together(slots, [held(row) for row in slots], [-1] * pp)
    last_forward = [_last_forward(row) for row in slots]
    # gradients of weights leave the drain, and return where its backward passes leave slots free
    drained = []
    for row, end in zip(slots, last_forward, strict=True):
        drained.append(_take_weights(row, end))
    move_together(slots, None, last_forward)
    for row, entries, end in zip(slots, drained, last_forward, strict=True):
        for entry in entries:
            time = max(entry.ready, end) + 1
            while time in row:
                time += 1
            entry.put(row, time)
    return tuple(tuple(_in_order(row)) for row in slots)


def _last_forward(row: Row) -> int:
    return max(time for time, entry in row.items() if entry.kind == "F")


def _take_weights(row: Row, end: int) -> list[Placed]:
    """Remove the gradients of the weights that run after a slot."""
    late = [time for time in sorted(row) if time > end]
    return [row.pop(time) for time in late if row[time].kind == "W"]


def _in_order(row: Row) -> Steps:
    for time in sorted(row):
        series, batch = row[time]
        yield series.kind, series.half, batch


def _all_series(pp: int, count: int) -> dict[Key, Series]:
    """Return the passes of every kind and stage."""
    stages = range(2 * pp)
    series: dict[Key, Series] = {}
    for kind in "FBW":
        for stage in stages:
            half = int(stage >= pp)
            series[kind, stage] = Series(kind, stage, half, [0] * count)
    loss = series["F", stages[-1]]
    for stage in stages:
        series["F", stage].inputs = series.get(("F", stage - 1))
        later = ("B", stage + 1)
        series["B", stage].inputs = series.get(later, loss)
        series["W", stage].inputs = series["B", stage]
    return series


def repeated(schedule: BuildingBlock, pp: int, count: int) -> list[Row]:
    """Repeat the block to the end; gradients of the weights take the slots that it leaves free."""
    series = _all_series(pp, count)
    slots: list[Row] = [{} for _ in range(pp)]
    for device, row in enumerate(slots):
        for key, first in schedule.starts(device, pp).items():
            for batch in range(count):
                Placed(series[key], batch).put(row, first + INTERVAL * batch)
        _fill_with_weights(row, series, 2 * count)
    return slots


def _fill_with_weights(row: Row, series: dict[Key, Series], left: int) -> None:
    """Put the gradients of the weights into free slots, in the order of their backward passes.

    Args:
        left: Number of these gradients.
    """
    waiting = deque[Placed]()
    time = min(row)
    while left:
        entry = row.get(time)
        if entry is None and waiting:
            waiting.popleft().put(row, time)
            left -= 1
        elif entry is not None and entry.kind == "B":
            weights = series["W", entry.series.stage]
            waiting.append(Placed(weights, entry.batch))
        time += 1


def held(row: Row) -> Counts:
    """Count the micro-batches that a device keeps after each slot, from forward pass to weights."""
    changes = np.zeros(max(row) + 1, dtype=np.int64)
    for time, entry in row.items():
        changes[time] = CHANGE[entry.kind]
    return np.cumsum(changes)


def move_together(slots: list[Row], counts: list[Counts] | None, after: list[int]) -> None:
    """Move passes in the order of their slots, each to the earliest free one at which it can run.

    Args:
        slots: Changed in place, like `counts`.
        counts: Micro-batches that devices keep by slot; moves keep the largest. None: no limit.
        after: Slot of every device after which passes move.
    """
    most = max(int(row.max()) for row in counts) if counts else 0
    end = max(map(max, slots)) + 1
    free = np.ones((len(slots), end), dtype=bool)
    for device, row in enumerate(slots):
        free[device, list(row)] = False
    for now in range(end):
        for device, row in enumerate(slots):
            if free[device, now] or now <= after[device]:
                continue
            entry = row[now]
            first = max(entry.ready, after[device]) + 1
            open_slots = free[device, first:now].copy()
            if counts and entry.kind == "F":
                _close_full(open_slots, counts[device][first:now] >= most)
            if not open_slots.any():
                continue
            slot = first + int(open_slots.argmax())
            if counts and entry.kind != "B":
                counts[device][slot:now] += CHANGE[entry.kind]
            del row[now]
            entry.put(row, slot)
            free[device, now] = True
            free[device, slot] = False


def _close_full(open_slots: NDArray[np.bool_], full: NDArray[np.bool_]) -> None:
    """Close all slots up to the last one at which the device is full."""
    (places,) = full.nonzero()
    if len(places):
        open_slots[: places[-1] + 1] = False
