"""ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2.2): ZB-H1 with twice its lead and its delay.

It keeps `2 pp - 1` micro-batches. Devices wait for the first forward passes alone, if there are at
least `2 pp` micro-batches and the gradient of the input takes at most twice as long as that of the
weights.
"""

from darts_parallel.schedules.zero_bubble_h1 import ZeroBubbleH1


class ZeroBubbleH2(ZeroBubbleH1):
    """No bubble, for twice the memory of 1F1B."""

    name = "zero_bubble_h2"
    aliases = ()
    starts_search = False
    times = 2


SCHEDULE = ZeroBubbleH2()
