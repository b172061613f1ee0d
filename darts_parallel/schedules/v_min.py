"""V-Min (Qi et al. 2024, arXiv 2405.15362, section 3): a third of the activations of 1F1B."""

from darts_parallel.schedules._block import BuildingBlock, Gaps


class VMin(BuildingBlock):
    """Passes go down and up the V as fast as they can."""

    name = "v_min"
    gaps = Gaps(1, 1, 1, 1)
    turnaround = 1

    def loss_waits(self, pp: int) -> int:
        """Return 2 passes for a number of devices that 3 divides."""
        return 0 if pp % 3 else 2


SCHEDULE = VMin()
