"""Schedules whose devices hold two stages each, placed as a V: device k holds stages k and 2 pp - 1 - k.

The last stage lies beside the first, so the loss's gradient starts where the forward began.

- `zero_bubble_v` (ZB-V of Qi et al. 2023, arXiv 2401.10241, section 6): the bubble vanishes where forward,
  backward and weight passes take equal seconds, with the memory of 1F1B. PyTorch's order.
- `v_half`, `v_min` (Qi et al. 2024, arXiv 2405.15362, section 3): one building block, repeated every six
  passes; how fast a micro-batch goes down and up the V decides how long it is kept, hence the memory: a half
  and a third of 1F1B's.
- `dualpipe` (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) cut in half: DualPipe feeds micro-batches from
  both ends and keeps the parameters twice; a V gives the same order with the parameters once. Its pairs of
  one forward and one backward are run one after the other here: what their overlap hides is communication.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

Pass = tuple[str, int, int]
"""Kind (`F`, `B`, `W`), half of the V (0: on the way down) and micro-batch."""

INTERVAL = 6
"""Passes of one micro-batch on a device: forward, backward and weights of two stages."""

BLOCKS = {"v_half": (1, 2, 1, 2), "v_min": (1, 1, 1, 1)}
"""Passes between neighbours: forward down and up, backward down and up the V."""


def v_passes(schedule: str, pp: int, count: int) -> tuple[tuple[Pass, ...], ...]:
    """Kind, stage in the order of layers and micro-batch of the passes of every device.

    Args:
        schedule, pp, count: As in `v_order`.
    """
    return tuple(
        tuple(
            (kind, 2 * pp - 1 - device if half else device, batch)
            for kind, half, batch in v_order(schedule, device, pp, count)
        )
        for device in range(pp)
    )


def v_order(schedule: str, device: int, pp: int, count: int) -> Iterator[Pass]:
    """The passes of a device in the order in which it runs them.

    Args:
        schedule: One of `cost_config.V_SHAPED`.
        device: From 0 to `pp - 1`.
        pp: Devices.
        count: Micro-batches; at least `2 * pp` for `dualpipe`.
    """
    if schedule == "zero_bubble_v":
        yield from (entry for entry in _zero_bubble_v(device, pp, count) if entry[2] < count)
    elif schedule == "dualpipe":
        yield from _dualpipe(device, pp, count)
    else:
        yield from _from_block(BLOCKS[schedule], pp, count)[device]


def _zero_bubble_v(device: int, pp: int, wanted: int) -> Iterator[Pass]:
    """ZB-V for at least `2 * pp - 1` micro-batches; of fewer the surplus ones are left out."""
    count = max(2 * pp - 1, wanted)
    done: Counter[tuple[str, int]] = Counter()

    def run(kind: str, half: int) -> Pass:
        done[kind, half] += 1
        return kind, half, done[kind, half] - 1

    def both(half: int) -> Iterator[Pass]:
        yield run("B", half)
        yield run("W", half)

    for _ in range(2 * (pp - device) - 1):
        yield run("F", 0)
    for _ in range(device):
        yield run("F", 1)
        yield run("F", 0)
    for _ in range(pp - device):
        yield run("F", 1)
        yield from both(1)
    while done["F", 1] < done["F", 0] or done["F", 0] < count:
        if done["F", 0] < count:
            yield run("F", 0)
        yield from both(0)
        yield run("F", 1)
        yield from both(1)
    for _ in range(device):
        yield run("B", 0)
        yield run("B", 1)
    for _ in range(pp - device):
        yield from both(0)
    for half in (1, 0):
        while done["W", half] < done["B", half]:
            yield run("W", half)


def _dualpipe(device: int, pp: int, count: int) -> Iterator[Pass]:
    """The eight steps of DualPipe, seen from one arm of the V."""
    done: Counter[tuple[str, int]] = Counter()
    later: deque[int] = deque()

    def run(kind: str, half: int) -> Pass:
        done[kind, half] += 1
        return kind, half, done[kind, half] - 1

    def backward(half: int, *, split: bool = False) -> Iterator[Pass]:
        yield run("B", half)
        if split:
            later.append(half)
        else:
            yield run("W", half)

    def weights() -> Iterator[Pass]:
        if later:
            yield run("W", later.popleft())

    after = pp - device - 1
    for _ in range(2 * after):
        yield run("F", 0)
    for _ in range(device + 1):
        yield run("F", 0)
        yield run("F", 1)
    for _ in range(after):
        yield from backward(1, split=True)
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
        yield from backward((turn + 1) % 2, split=turn >= 2 * ((device + 1) // 2) + 1 - device % 2)
    for _ in range(after):
        yield from weights()
        yield from backward(0, split=True)
    while later:
        yield from weights()


@lru_cache(maxsize=8)
def _from_block(steps: tuple[int, int, int, int], pp: int, count: int) -> tuple[tuple[Pass, ...], ...]:
    """A building block repeated every `INTERVAL` passes; weights take the slots that it leaves free.

    Behind its last forward pass a device runs every backward pass as soon as its input is there, by passes of
    equal seconds, and weights beside them (the cool-down of the authors' own schedules).
    """
    orders = [list(_repeated(steps, device, pp, count)) for device in range(pp)]
    last = [max(at for at, entry in enumerate(order) if entry[0] == "F") + 1 for order in orders]
    # passes of one kind and half get ready one after the other: the first of each queue is the next
    waiting = [
        [
            [deque(e for e in enumerate(order[cut:]) if e[1][:2] == (kind, half)) for half in (0, 1)]
            for kind in "BW"
        ]
        for order, cut in zip(orders, last, strict=True)
    ]
    result: list[list[Pass]] = [[] for _ in orders]
    never = len(orders) * len(orders[0]) * INTERVAL
    ended = {(kind, stage): [never] * count for kind in "FBW" for stage in range(2 * pp)}

    def ready(entry: Pass, device: int, now: int) -> bool:
        kind, half, batch = entry
        stage = 2 * pp - 1 - device if half else device
        if kind == "F":
            return stage == 0 or ended["F", stage - 1][batch] < now
        if kind == "W":
            return ended["B", stage][batch] < now
        return ended["F" if stage == 2 * pp - 1 else "B", min(stage + 1, 2 * pp - 1)][batch] < now

    def drained(device: int, now: int) -> Pass | None:
        """Take the next pass behind the last forward: backwards before weights, each as written."""
        for queues in waiting[device]:
            able = [queue for queue in queues if queue and ready(queue[0][1], device, now)]
            if able:
                return min(able, key=lambda queue: queue[0][0]).popleft()[1]
        return None

    now, left = 0, sum(len(order) for order in orders)
    while left:
        for device, order in enumerate(orders):
            done = len(result[device])
            if done >= last[device]:
                entry = drained(device, now)
            else:
                entry = order[done] if ready(order[done], device, now) else None
            if entry is not None:
                kind, half, batch = entry
                ended[kind, 2 * pp - 1 - device if half else device][batch] = now
                result[device].append(entry)
                left -= 1
        now += 1
    return tuple(tuple(order) for order in result)


def _repeated(steps: tuple[int, int, int, int], device: int, pp: int, count: int) -> Iterator[Pass]:
    """A building block repeated to the end, weights in the slots that it leaves free."""
    turns = _turns(steps, pp)
    starts = _starts(steps, turns, device, pp)
    planned = {
        time + INTERVAL * batch: (kind, half, batch)
        for (kind, half), time in starts.items()
        for batch in range(count)
    }
    waiting, done = deque[tuple[int, int]](), 0
    time = min(planned)
    while done < 2 * count:
        entry = planned.get(time)
        if entry is not None:
            yield entry
            if entry[0] == "B":
                waiting.append(entry[1:])
        elif waiting:
            yield ("W", *waiting.popleft())
            done += 1
        time += 1


@lru_cache(maxsize=256)
def _turns(steps: tuple[int, int, int, int], pp: int) -> tuple[int, int, int]:
    """The shortest stays at the three turns of the V for which no device has two passes at once."""
    stays = range(1, INTERVAL + 1)
    for turns in sorted(product(stays, stays, stays), key=lambda t: (sum(t), t)):
        slots = [[t % INTERVAL for t in _starts(steps, turns, k, pp).values()] for k in range(pp)]
        if all(len(set(row)) == len(row) for row in slots):
            return turns
    raise AssertionError("a building block that fits no pipeline")


def _starts(
    steps: tuple[int, int, int, int], turns: tuple[int, int, int], device: int, pp: int
) -> dict[tuple[str, int], int]:
    """When a device runs the first micro-batch, in passes."""
    down, up, back_down, back_up = steps
    far = pp - 1 - device
    bottom = (pp - 1) * down + turns[0]
    top = bottom + (pp - 1) * up + turns[1]
    again = top + (pp - 1) * back_down + turns[2]
    return {
        ("F", 0): device * down,
        ("F", 1): bottom + far * up,
        ("B", 1): top + device * back_down,
        ("B", 0): again + far * back_up,
    }
