"""ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2.2): ZB-H1 twice as far ahead, its weights twice as late.

With the memory of `2 pp - 1` micro-batches nothing waits but for the first forward passes, where there are at
least `2 pp` micro-batches and the gradient of the input takes at most twice as long as that of the weights.
"""

from darts_parallel.schedules.zero_bubble_h1 import ZeroBubbleH1


class ZeroBubbleH2(ZeroBubbleH1):
    """No bubble, for twice the memory of 1F1B."""

    name = "zero_bubble_h2"
    aliases = ()
    times = 2


SCHEDULE = ZeroBubbleH2()
