"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose backward is split.

The gradient of the input (B) is what the device before waits for; for that of the weights (W) nobody waits:
device k runs the W of a micro-batch k backwards late, and so fills the bubble at the end.
"""

from collections.abc import Iterator

from darts_parallel.schedules._schedule import Operation, Schedule
from darts_parallel.schedules.one_f_one_b import SCHEDULE as ONE_F_ONE_B


class ZeroBubbleH1(Schedule):
    """1F1B with the gradients of the weights in its bubble."""

    name = "zero_bubble_h1"
    aliases = ("zero_bubble",)
    split = True

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Iterator[Operation]:
        """Run the passes of 1F1B, and weights `device` backwards late."""
        for operation in ONE_F_ONE_B.passes(device, pp, count, chunks):
            yield operation
            if operation.kind == "B" and operation.micro_batch >= device:
                yield Operation("W", device, operation.micro_batch - device)
        for batch in range(max(count - device, 0), count):
            yield Operation("W", device, batch)


SCHEDULE = ZeroBubbleH1()
