"""V-Min (Qi et al. 2024, arXiv 2405.15362, section 3): a third of the activations of 1F1B."""

from darts_parallel.schedules._block import BuildingBlock, Gaps


class VMin(BuildingBlock):
    """Passes go down and up the V as fast as they can."""

    name = "v_min"
    gaps = Gaps(1, 1, 1, 1)
    turnaround = 1
    loss_wait = 2
    clashing = 3


SCHEDULE = VMin()
