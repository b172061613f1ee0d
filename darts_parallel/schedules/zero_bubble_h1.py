"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B whose backward is split.

The previous device waits for the gradient of the input (B). Nobody waits for the gradient of the
weights (W): device k runs the W of a micro-batch k backwards late, and so fills the bubble at the
end.
"""

from darts_parallel.schedules._schedule import Operation, Passes, Schedule


class ZeroBubbleH1(Schedule):
    """1F1B with the gradients of the weights in its bubble."""

    name = "zero_bubble_h1"
    aliases: tuple[str, ...] = ("zero_bubble",)
    split = True
    starts_search = True
    times = 1
    """Factor of 1F1B's lead of forward passes, and of the delay of the gradients of the weights."""

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Run the passes of 1F1B, and weights `device` backwards late."""
        ahead = min(self.times * (pp - device - 1), count)
        late = min(self.times * device, device + max(count - pp, 0))
        for batch in range(-ahead, count + late):
            entries = {"F": batch + ahead, "B": batch, "W": batch - late}
            for kind, own in entries.items():
                if 0 <= own < count:
                    yield Operation(kind, device, own)


SCHEDULE = ZeroBubbleH1()
