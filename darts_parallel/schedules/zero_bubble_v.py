"""ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6), in PyTorch's order.

The bubble vanishes if forward, backward and weight passes take equal seconds, with the memory of
1F1B. That takes 2 pp - 1 micro-batches. With fewer, PyTorch's order runs weight passes while other
devices wait for what follows, so they are moved (`_late_weights.py`), and PyTorch gets the passes.
"""

from functools import lru_cache

from darts_parallel.schedules._folded import Folded, Runner, Step, Steps
from darts_parallel.schedules._late_weights import with_late_weights


class ZeroBubbleV(Folded):
    """Zero bubble on a V."""

    name = "zero_bubble_v"
    pytorch = "ZBVZeroBubble"
    starts_search = True

    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Take PyTorch's order where there are enough micro-batches for it."""
        if count < _enough(pp):
            yield from _few(pp, count)[device]
        else:
            yield from _steps(device, pp, count)

    def pytorch_class(self, pp: int, count: int) -> str | None:
        """Return no class where passes are moved."""
        return None if count < _enough(pp) else self.pytorch


def _enough(pp: int) -> int:
    return 2 * pp - 1


@lru_cache(maxsize=64)
def _few(pp: int, count: int) -> tuple[tuple[Step, ...], ...]:
    """Write the order for enough micro-batches, leave the surplus out, and move the weights."""
    orders = []
    for device in range(pp):
        steps = _steps(device, pp, _enough(pp))
        orders.append([step for step in steps if step[2] < count])
    return with_late_weights(orders, 2 * pp)


def _steps(device: int, pp: int, count: int) -> Steps:
    """Write the order for at least `2 * pp - 1` micro-batches."""
    runner = Runner()
    run, backward, done = runner.run, runner.backward, runner.done
    for _ in range(2 * (pp - device) - 1):
        yield run("F", 0)
    for _ in range(device):
        yield run("F", 1)
        yield run("F", 0)
    for _ in range(pp - device):
        yield run("F", 1)
        yield from backward(1)
    while done["F", 1] < done["F", 0] or done["F", 0] < count:
        if done["F", 0] < count:
            yield run("F", 0)
        yield from backward(0)
        yield run("F", 1)
        yield from backward(1)
    for _ in range(device):
        yield run("B", 0)
        yield run("B", 1)
    for _ in range(pp - device):
        yield from backward(0)
    yield from runner.weights(1)
    yield from runner.weights(0)


SCHEDULE = ZeroBubbleV()
