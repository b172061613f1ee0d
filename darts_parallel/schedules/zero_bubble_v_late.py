"""ZB-V for few micro-batches: weight passes run where a device would wait (`_late_weights.py`).

ZB-V has no bubble from 2 pp - 1 micro-batches on. With fewer, its weight passes keep devices from
passes that others wait for. Without them the bubble halves at pp micro-batches. A device then leaves
up to pp weight passes for later, with what they need in memory: plans with recomputation need more
memory than under `zero_bubble_v`.
"""

from functools import lru_cache

from darts_parallel.schedules._folded import Folded, Step, Steps
from darts_parallel.schedules._late_weights import with_late_weights
from darts_parallel.schedules.zero_bubble_v import SCHEDULE as ZERO_BUBBLE_V


class ZeroBubbleVLate(Folded):
    """ZB-V with late weight passes."""

    name = "zero_bubble_v_late"

    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Read the passes of all devices, which are placed together."""
        yield from _placed(pp, count)[device]


@lru_cache(maxsize=64)
def _placed(pp: int, count: int) -> tuple[tuple[Step, ...], ...]:
    """Keep ZB-V's forward and backward passes; with enough micro-batches, its weight passes, too."""
    orders = [tuple(ZERO_BUBBLE_V.steps(device, pp, count)) for device in range(pp)]
    if count >= 2 * pp - 1:
        return tuple(orders)
    return with_late_weights(orders, 2 * pp, pp)


SCHEDULE = ZeroBubbleVLate()
