"""Gradients of the weights run where a device of a V would wait, or where its memory is full.

The order of forward and backward passes stays as it is. All passes count one second.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from darts_parallel.schedules._folded import Step
from darts_parallel.schedules._searched import source

Ends = dict[tuple[str, int, int], int]
"""Second at which the pass of a kind, stage and micro-batch ends."""


@dataclass
class _Device:
    """A device that runs its passes second by second."""

    stages: tuple[int, int]
    """Stages of both halves of the V."""
    last_stage: int
    most: int
    """Micro-batches of a stage that it can hold, from forward pass to gradient of the weights."""
    most_weights: int
    """Gradients of the weights that it can leave for later."""
    left: deque[Step]
    """Forward and backward passes that have not run."""
    weights: deque[Step] = field(default_factory=deque)
    """Gradients of the weights that may run."""
    held: int = 0
    done: list[Step] = field(default_factory=list)

    def next(self, now: int, ends: Ends) -> Step | None:
        """Take the pass that runs in a second; None: the device waits."""
        if self.left and len(self.weights) < self.most_weights and self._may_run(now, ends):
            step = self.left.popleft()
            kind, half, batch = step
            if kind == "F":
                self.held += 1
            else:
                self.weights.append(("W", half, batch))
        elif self.weights:
            step = self.weights.popleft()
            self.held -= 1
        else:
            return None
        self.done.append(step)
        return step

    def _may_run(self, now: int, ends: Ends) -> bool:
        kind, half, batch = self.left[0]
        if kind == "F" and self.held == self.most:
            return False
        needed = source(kind, self.stages[half], batch, self.last_stage + 1, "B")
        return needed is None or ends.get(needed, now + 1) <= now


def with_late_weights(
    orders: Iterable[Iterable[Step]], most: int, most_weights: int
) -> tuple[tuple[Step, ...], ...]:
    """Return the passes of every device with the gradients of the weights as late as above.

    Args:
        orders: Passes by device; gradients of the weights in them are ignored.
        most: Micro-batches of a stage that a device can hold; the orders hold no more.
        most_weights: Gradients of the weights that a device can leave for later.
    """
    rows = [deque(step for step in order if step[0] != "W") for order in orders]
    last = 2 * len(rows) - 1
    devices = []
    for number, row in enumerate(rows):
        stages = (number, last - number)
        devices.append(_Device(stages, last, most, most_weights, row))
    ends: Ends = {}
    now = 0
    while any(device.left or device.weights for device in devices):
        ran = [device.next(now, ends) for device in devices]
        now += 1
        for device, step in zip(devices, ran, strict=True):
            if step is not None:
                kind, half, batch = step
                ends[kind, device.stages[half], batch] = now
    return tuple(tuple(device.done) for device in devices)
