"""V-Half (Qi et al. 2024, arXiv 2405.15362, section 3): half of the activations of 1F1B."""

from darts_parallel.schedules._block import BuildingBlock, Gaps


class VHalf(BuildingBlock):
    """Passes go up the V half as fast as down."""

    name = "v_half"
    gaps = Gaps(1, 2, 1, 2)
    turnaround = 2
    loss_wait = 3
    clashing = 2


SCHEDULE = VHalf()
