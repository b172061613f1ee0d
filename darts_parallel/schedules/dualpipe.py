"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1), cut in half.

DualPipe feeds micro-batches from both ends and keeps the parameters twice. A V gives the same order
with the parameters once. Its pairs of one forward and one backward run one after the other here,
since their overlap hides communication alone.
"""

from collections import deque

from darts_parallel.schedules._folded import Folded, Runner, Steps


class DualPipe(Folded):
    """The eight steps of DualPipe, seen from one half of the V."""

    name = "dualpipe"
    pytorch = "DualPipeV"

    def count_rule(self, pp: int, count: int) -> tuple[str, int]:
        """Demand as many micro-batches as stages."""
        return f"at least 2 * pp = {2 * pp} with the schedule dualpipe", max(count, 2 * pp)

    def steps(self, device: int, pp: int, count: int) -> Steps:
        """Run the steps in turn; some backwards leave their weights for later."""
        runner = Runner()
        run = runner.run
        backward = runner.backward
        later: deque[int] = deque()

        def split(half: int) -> Steps:
            yield run("B", half)
            later.append(half)

        def weights() -> Steps:
            if later:
                yield run("W", later.popleft())

        after = pp - device - 1
        for _ in range(2 * after):
            yield run("F", 0)
        for _ in range(device + 1):
            yield run("F", 0)
            yield run("F", 1)
        for _ in range(after):
            yield from split(1)
            yield from weights()
            yield run("F", 1)
        for _ in range(count - 2 * pp + device + 1):
            yield run("F", 0)
            yield from backward(1)
            yield run("F", 1)
            yield from backward(0)
        for _ in range(after):
            yield from backward(1)
            yield run("F", 1)
            yield from backward(0)
        # the second half of the last backwards leaves its weights for the end
        for turn in range(2 * (device + 1)):
            leaves = turn >= 2 * ((device + 1) // 2) + 1 - device % 2
            yield from (split if leaves else backward)((turn + 1) % 2)
        for _ in range(after):
            yield from weights()
            yield from split(0)
        while later:
            yield from weights()


SCHEDULE = DualPipe()
