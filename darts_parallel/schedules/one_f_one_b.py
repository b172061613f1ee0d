"""1F1B: PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

As many forwards as there are later devices, then one forward and one backward in turn, then the
remaining backwards.
"""

from darts_parallel.schedules._schedule import Operation, Passes, Schedule


class OneForwardOneBackward(Schedule):
    """1F1B; its seconds have a closed form (`cost/pipeline.py`)."""

    name = "1f1b"
    pytorch = "1F1B"

    def passes(self, device: int, pp: int, count: int, chunks: int) -> Passes:
        """Run ahead by the devices behind, then alternate."""
        ahead = min(pp - device - 1, count)
        for batch in range(ahead):
            yield Operation("F", device, batch)
        for batch in range(count):
            if ahead + batch < count:
                yield Operation("F", device, ahead + batch)
            yield Operation("B", device, batch)

    def pytorch_class(self, pp: int, count: int) -> str | None:
        """Return GPipe for fewer micro-batches than stages: torch's 1F1B refuses them."""
        return "GPipe" if count < pp else self.pytorch


SCHEDULE = OneForwardOneBackward()
