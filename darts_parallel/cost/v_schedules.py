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

import numpy as np
from numpy.typing import NDArray

Pass = tuple[str, int, int]
"""Kind (`F`, `B`, `W`), half of the V (0: on the way down) and micro-batch."""
Slots = list[dict[int, Pass]]
"""The passes of every device by their slots."""
Counts = NDArray[np.int64]
Ends = dict[tuple[str, int], list[int]]
"""Slots of the passes of a kind and stage by micro-batch."""

INTERVAL = 6
"""Passes of one micro-batch on a device: forward, backward and weights of two stages."""

STEPS = {"F": 1, "B": 0, "W": -1}
"""By how many passes more a device holds what backward needs."""

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
        yield from _from_block(schedule, pp, count)[device]


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
def _from_block(schedule: str, pp: int, count: int) -> tuple[tuple[Pass, ...], ...]:
    """A building block repeated every `INTERVAL` passes, moved together where it leaves slots free.

    As in the authors' schedules: weights take the slots that the block leaves free; every pass moves to the
    earliest free slot behind its input, by passes of equal seconds, while no device holds more than any does
    without; behind its last forward pass a device runs its backward passes as early as they can.
    """
    slots, ended = _repeated(schedule, pp, count)
    _move_together(slots, ended, [_held(row) for row in slots], [-1] * pp)
    last = [max(time for time, entry in row.items() if entry[0] == "F") for row in slots]
    # weights leave the drain, and come back where its backward passes leave slots free
    drained = [
        [row.pop(time) for time in sorted(row) if time > end and row[time][0] == "W"]
        for row, end in zip(slots, last, strict=True)
    ]
    _move_together(slots, ended, None, last)
    for device, entries in enumerate(drained):
        for entry in entries:
            time = max(_ready(ended, entry, device, pp), last[device]) + 1
            while time in slots[device]:
                time += 1
            _put(slots, ended, device, time, entry)
    return tuple(tuple(row[time] for time in sorted(row)) for row in slots)


def _put(slots: Slots, ended: Ends, device: int, time: int, entry: Pass) -> None:
    """Give a pass its slot."""
    slots[device][time] = entry
    ended[entry[0], _stage(entry[1], device, len(slots))][entry[2]] = time


def _stage(half: int, device: int, pp: int) -> int:
    """Stage in the order of layers."""
    return 2 * pp - 1 - device if half else device


def _repeated(schedule: str, pp: int, count: int) -> tuple[Slots, Ends]:
    """A building block repeated to the end, weights in the slots that it leaves free."""
    slots: Slots = [{} for _ in range(pp)]
    ended: Ends = {(kind, stage): [0] * count for kind in "FBW" for stage in range(2 * pp)}
    for device, row in enumerate(slots):
        for (kind, half), time in _starts(schedule, device, pp).items():
            for batch in range(count):
                _put(slots, ended, device, time + INTERVAL * batch, (kind, half, batch))
        waiting, time, left = deque[tuple[int, int]](), min(row), 2 * count
        while left:
            entry = row.get(time)
            if entry is None and waiting:
                _put(slots, ended, device, time, ("W", *waiting.popleft()))
                left -= 1
            elif entry is not None and entry[0] == "B":
                waiting.append(entry[1:])
            time += 1
    return slots, ended


def _held(row: dict[int, Pass]) -> Counts:
    """Passes that a device holds behind each of its slots, from their forward to their weights."""
    return np.cumsum([STEPS[row[time][0]] if time in row else 0 for time in range(max(row) + 1)])


def _ready(ended: Ends, entry: Pass, device: int, pp: int) -> int:
    """The slot behind which the input of a pass is there and the micro-batch before has had its own."""
    kind, stage, batch = entry[0], _stage(entry[1], device, pp), entry[2]
    before = ended[kind, stage][batch - 1] if batch else -1
    if kind == "F":
        return max(before, ended["F", stage - 1][batch] if stage else -1)
    if kind == "W":
        return max(before, ended["B", stage][batch])
    turned = stage == 2 * pp - 1
    return max(before, ended["F" if turned else "B", stage if turned else stage + 1][batch])


def _move_together(slots: Slots, ended: Ends, held: list[Counts] | None, after: list[int]) -> None:
    """Move passes in the order of their slots, each to the earliest free one at which it can run.

    Args:
        slots, ended: Are changed.
        held: Of every slot of every device, what no slot may pass is the largest; is changed. None: no limit.
        after: Slot of every device behind which passes move.
    """
    pp, most = len(slots), max(int(row.max()) for row in held) if held else 0
    for now in range(max(map(max, slots)) + 1):
        for device, row in enumerate(slots):
            entry = row.get(now)
            if entry is None or now <= after[device]:
                continue
            first = max(_ready(ended, entry, device, pp), after[device]) + 1
            while first < now and first in row:
                first += 1
            if first >= now:
                continue
            if held and entry[0] == "F":
                full = np.flatnonzero(held[device][first:now] >= most)
                first += int(full[-1]) + 1 if len(full) else 0
                while first < now and first in row:
                    first += 1
            if held and entry[0] != "B":
                held[device][first:now] += STEPS[entry[0]]
            _put(slots, ended, device, first, row.pop(now))


def _starts(schedule: str, device: int, pp: int) -> dict[tuple[str, int], int]:
    """When a device runs the first micro-batch, in passes.

    Where a device would have two passes at once, the loss waits.
    """
    down, up, back_down, back_up = BLOCKS[schedule]
    far, half = pp - 1 - device, schedule == "v_half"
    bottom = (pp - 1) * down + 1
    waits = (3 if pp % 2 == 0 else 0) if half else (2 if pp % 3 == 0 else 0)
    top = bottom + (pp - 1) * up + 1 + waits
    again = top + (pp - 1) * back_down + (2 if half else 1)
    return {
        ("F", 0): device * down,
        ("F", 1): bottom + far * up,
        ("B", 1): top + device * back_down,
        ("B", 0): again + far * back_up,
    }
