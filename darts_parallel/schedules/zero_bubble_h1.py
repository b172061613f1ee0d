"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose backward is split.

The gradient of the input (B) is what the device before waits for; for that of the weights (W) nobody waits:
device k runs the W of a micro-batch k backwards late, and so fills the bubble at the end.
"""

from collections.abc import Iterator

from darts_parallel.schedules._schedule import Operation, Schedule


class ZeroBubbleH1(Schedule):
    """1F1B with the gradients of the weights in its bubble."""

    name = "zero_bubble_h1"
    aliases: tuple[str, ...] = ("zero_bubble",)
    split = True
    times = 1
    """Times that a device runs as far ahead as in 1F1B, and that its weights are as late."""

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Run the passes of 1F1B, and weights `device` backwards late."""
        ahead = min(self.times * (pp - device - 1), count)
        late = min(self.times * device, device + max(count - pp, 0))
        for batch in range(-ahead, count + late):
            steps = (("F", batch + ahead), ("B", batch), ("W", batch - late))
            yield from (Operation(kind, device, own) for kind, own in steps if 0 <= own < count)


SCHEDULE = ZeroBubbleH1()
