"""Schedules of two stages a device, placed as a V: the last stage lies next to the first.

The loss's gradient therefore starts where the forward began.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator

from darts_parallel.schedules._schedule import Operation, Schedule

Step = tuple[str, int, int]
"""Kind (`F`, `B`, `W`), half of the V (0: on the way down) and micro-batch."""


class Folded(Schedule):
    """A schedule on a V, written by halves of the V."""

    chunks = 2
    split = True
    folded = True

    @abstractmethod
    def steps(self, device: int, pp: int, count: int) -> Iterator[Step]:
        """Yield the passes of a device by half of the V."""

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Name the stages of the halves."""
        for kind, half, batch in self.steps(device, pp, count):
            yield Operation(kind, 2 * pp - 1 - device if half else device, batch)


class Runner:
    """The passes of a device so far; each one takes the next micro-batch of its kind and half."""

    def __init__(self) -> None:
        self.done: Counter[tuple[str, int]] = Counter()

    def run(self, kind: str, half: int) -> Step:
        """Run the next pass of a kind and half."""
        self.done[kind, half] += 1
        return kind, half, self.done[kind, half] - 1

    def backward(self, half: int) -> Iterator[Step]:
        """Run a backward pass and its gradient of the weights at once."""
        yield self.run("B", half)
        yield self.run("W", half)
