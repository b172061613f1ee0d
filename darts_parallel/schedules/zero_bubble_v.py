"""ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6), in PyTorch's order.

The bubble vanishes if forward, backward and weight passes take equal seconds, with the memory of
1F1B.
"""

from darts_parallel.schedules._folded import Folded, Runner, Steps


class ZeroBubbleV(Folded):
    """Zero bubble on a V."""

    name = "zero_bubble_v"
    pytorch = "ZBVZeroBubble"
    starts_search = True

    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Write the order for enough micro-batches, and leave the surplus out."""
        least = max(2 * pp - 1, count)
        for kind, half, batch in _steps(device, pp, least):
            if batch < count:
                yield kind, half, batch


def _steps(device: int, pp: int, count: int) -> Steps:
    """Write the order for at least `2 * pp - 1` micro-batches."""
    runner = Runner()
    run = runner.run
    backward = runner.backward
    done = runner.done
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
