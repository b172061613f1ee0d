"""Schedules of two stages a device, placed as a V: the last stage lies next to the first.

The loss's gradient therefore starts where the forward began.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator

from darts_parallel.schedules._schedule import Operation, Passes, Schedule

Step = tuple[str, int, int]
"""Kind (`F`, `B`, `W`), half of the V (0: on the way down) and micro-batch."""
Steps = Iterator[Step]


class Folded(Schedule):
    """A schedule on a V, written by halves of the V."""

    chunks = 2
    split = True
    folded = True

    @abstractmethod
    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Yield the passes of a device by half of the V."""

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Name the stages of the halves."""
        for kind, half, batch in self.steps(device, pp, count):
            stage = 2 * pp - 1 - device if half else device
            yield Operation(kind, stage, batch)


class Runner:
    """The passes of a device so far; each one takes the next micro-batch of its kind and half."""

    def __init__(self) -> None:
        self.done: Counter[tuple[str, int]] = Counter()

    def run(self, kind: str, half: int) -> Step:
        """Run the next pass of a kind and half."""
        batch = self.done[kind, half]
        self.done[kind, half] = batch + 1
        return kind, half, batch

    def backward(self, half: int) -> Steps:
        """Run a backward pass and its gradient of the weights at once."""
        yield self.run("B", half)
        yield self.run("W", half)

    def weights(self, half: int) -> Steps:
        """Run the gradients of the weights that backward passes left."""
        while self.done["W", half] < self.done["B", half]:
            yield self.run("W", half)
