"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards."""

from darts_parallel.schedules._schedule import Operation, Passes, PerStage, Schedule


class GPipe(Schedule):
    """Two flow shops one after the other: each further micro-batch adds its slowest passes."""

    name = "gpipe"
    pytorch = "GPipe"

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Run all forwards before the first backward."""
        for kind in "FB":
            for batch in range(count):
                yield Operation(kind, device, batch)

    def in_flight(self, pp: int, count: int, chunks: int) -> PerStage:
        """Return all micro-batches."""
        return (count,) * pp


SCHEDULE = GPipe()
