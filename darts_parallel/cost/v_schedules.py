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
Counts = NDArray[np.int64]
Ends = dict[tuple[str, int], list[int]]
"""Slots of the passes of a kind and stage by micro-batch."""


class _Turn:
    """The passes of a kind and a stage, in the order of micro-batches."""

    def __init__(self, kind: str, half: int, ended: list[int], given: list[int] | None) -> None:
        self.kind, self.half = kind, half
        self.ended = ended
        """Their slots."""
        self.given = given
        """Those of the passes that give their input; None: there is none."""

    def ready(self, batch: int) -> int:
        """The slot behind which the input of a pass is there and the micro-batch before has had its own."""
        before = self.ended[batch - 1] if batch else -1
        return before if self.given is None else max(before, self.given[batch])


Slots = list[dict[int, tuple[_Turn, int]]]
"""Turn and micro-batch of every pass, by its slot, of every device."""

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
    slots = _repeated(schedule, pp, count)
    _move_together(slots, [_held(row) for row in slots], [-1] * pp)
    last = [max(time for time, (turn, _) in row.items() if turn.kind == "F") for row in slots]
    # weights leave the drain, and come back where its backward passes leave slots free
    drained = [
        [row.pop(time) for time in sorted(row) if time > end and row[time][0].kind == "W"]
        for row, end in zip(slots, last, strict=True)
    ]
    _move_together(slots, None, last)
    for row, entries, end in zip(slots, drained, last, strict=True):
        for turn, batch in entries:
            time = max(turn.ready(batch), end) + 1
            while time in row:
                time += 1
            row[time], turn.ended[batch] = (turn, batch), time
    return tuple(
        tuple((turn.kind, turn.half, batch) for turn, batch in (row[time] for time in sorted(row)))
        for row in slots
    )


def _turns(device: int, ended: Ends, pp: int) -> dict[tuple[str, int], _Turn]:
    """The passes of a device by kind and half of the V."""
    last, turns = 2 * pp - 1, {}
    for half, stage in enumerate((device, last - device)):
        before = ended["F", stage - 1] if stage else None
        behind = ended["F", last] if stage == last else ended["B", stage + 1]
        for kind, given in (("F", before), ("B", behind), ("W", ended["B", stage])):
            turns[kind, half] = _Turn(kind, half, ended[kind, stage], given)
    return turns


def _repeated(schedule: str, pp: int, count: int) -> Slots:
    """A building block repeated to the end, weights in the slots that it leaves free."""
    ended: Ends = {(kind, stage): [0] * count for kind in "FBW" for stage in range(2 * pp)}
    slots: Slots = [{} for _ in range(pp)]
    for device, row in enumerate(slots):
        turns = _turns(device, ended, pp)
        for key, first in _starts(schedule, device, pp).items():
            turn = turns[key]
            turn.ended[:] = times = range(first, first + INTERVAL * count, INTERVAL)
            row.update((time, (turn, batch)) for batch, time in enumerate(times))
        waiting, time, left = deque[tuple[_Turn, int]](), min(row), 2 * count
        while left:
            entry = row.get(time)
            if entry is None and waiting:
                turn, batch = row[time] = waiting.popleft()
                turn.ended[batch] = time
                left -= 1
            elif entry is not None and entry[0].kind == "B":
                waiting.append((turns["W", entry[0].half], entry[1]))
            time += 1
    return slots


def _held(row: dict[int, tuple[_Turn, int]]) -> Counts:
    """Passes that a device holds behind each of its slots, from their forward to their weights."""
    return np.cumsum([STEPS[row[time][0].kind] if time in row else 0 for time in range(max(row) + 1)])


def _move_together(slots: Slots, held: list[Counts] | None, after: list[int]) -> None:
    """Move passes in the order of their slots, each to the earliest free one at which it can run.

    Args:
        slots: Are changed.
        held: Of every slot of every device, what no slot may pass is the largest; is changed. None: no limit.
        after: Slot of every device behind which passes move.
    """
    most = max(int(row.max()) for row in held) if held else 0
    end = max(map(max, slots)) + 1
    # of every slot behind `now`, one from which on the next free slot is looked for
    free = [list(range(end + 1)) for _ in slots]
    for now in range(end):
        for device, row in enumerate(slots):
            entry = row.get(now)
            if entry is None or now <= after[device]:
                continue
            (turn, batch), ways = entry, free[device]
            first = max(turn.ready(batch), after[device]) + 1
            if first < now and ways[first] != first:
                first = _next_free(ways, first, now)
            if first < now and held and turn.kind == "F":
                (full,) = (held[device][first:now] >= most).nonzero()
                first = _next_free(ways, first + int(full[-1]) + 1, now) if len(full) else first
            if first >= now:
                ways[now] = now + 1
                continue
            if held and turn.kind != "B":
                held[device][first:now] += STEPS[turn.kind]
            del row[now]
            row[first], turn.ended[batch], ways[first] = entry, first, first + 1


def _next_free(ways: list[int], slot: int, end: int) -> int:
    """The first free slot from `slot` on, or `end`; shortens the ways to it."""
    found = slot
    while found < end and ways[found] != found:
        found = ways[found]
    found = min(found, end)
    while slot < found:
        slot, ways[slot] = ways[slot], found
    return found


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
