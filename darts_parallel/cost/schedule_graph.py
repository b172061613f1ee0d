"""A pipeline schedule as arrays: dependencies of every pass, and its steady-state period.

Passes that are equally many hops away from the start form a level: none of them waits for another.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_parallel.errors import PlanError
from darts_parallel.schedules import find

Indices = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT, WHOLE, NOTHING = range(5)
"""Kinds of pass. `BACKWARD` is the gradient of the input alone, where the schedule splits the
pass. Otherwise the pass is `WHOLE`, and `NOTHING` stands for the weights' gradient: devices have
equally many passes."""
ROWS_PER_STAGE = 5
"""Rows of seconds by stage. In order: forward, backward of the input, weights' gradient, the
messages after all stages but the last, a row of zeros, whole backward."""
PLACES = np.array([FORWARD, BACKWARD, WEIGHT, BACKWARD, WEIGHT])
"""Kind for which other passes wait, by kind of the pass: `WHOLE` counts as `BACKWARD`."""
UNKNOWN = -2
"""Hops of a pass that are not counted yet."""
CACHED_GRAPHS, CACHED_ORDERS = 128, 64
"""Graphs and orders of passes that are remembered: more than one job's outer choices."""


def zero_row(stages: int) -> int:
    """Return the index of the row of zeros."""
    return 4 * stages - 1


class Level(NamedTuple):
    """Passes that are equally many hops from the start."""

    passes: slice
    previous: Indices
    """The pass before each one on its device; N: none."""
    source: Indices
    """The pass that gives each one its input; N: none."""


@dataclass(frozen=True)
class Graph:
    """A schedule as arrays; its N passes are sorted by their distance from the start in hops."""

    num_micro_batches: int
    operations: Indices
    """Kind (index in `Schedule.kinds`), stage and micro-batch of every pass, `(N, 3)`."""
    bounds: tuple[int, ...]
    """First pass of every level, and N."""
    previous: Indices
    """The pass before on the same device, `(N,)`; N: none."""
    source: Indices
    """The pass that gives the input, `(N,)`; N: none."""
    duration: Indices
    """Row of `PassSeconds.rows`, `(N,)`."""
    message: Indices
    """Row of the message that brings the input, `(N,)`."""
    last: Indices
    """Last pass of every device, `(pp,)`."""
    frames: Indices
    """Passes of the last frames before the pipeline drains, `(frames, passes of one)`.

    No pass waits for one that is more than a frame back or in a later frame.
    """

    def __len__(self) -> int:
        return len(self.operations)

    @cached_property
    def widest(self) -> int:
        """Passes of the largest level."""
        return max(end - first for first, end in pairwise(self.bounds))

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Levels in the order of their distance from the start."""
        levels = []
        for first, end in pairwise(self.bounds):
            passes = slice(first, end)
            levels.append(Level(passes, self.previous[passes], self.source[passes]))
        return tuple(levels)


@lru_cache(maxsize=CACHED_GRAPHS)
def compiled(
    schedule: str,
    pp: int,
    num_micro_batches: int,
    chunks: int,
) -> Graph:
    """Return the graph of a schedule (a pure function, remembered).

    Args:
        schedule, pp, num_micro_batches: As in `device_ends`.
        chunks: Stages of each device.
    """
    stages = pp * chunks
    orders = _orders(schedule, pp, num_micro_batches, chunks)
    listed = orders.reshape(-1, 3)
    kind, stage, _ = listed.T
    total = len(listed)
    length = total // pp
    previous, source = _waits(orders, stages)
    hops = _counted_hops(source, pp)
    order = np.argsort(hops, kind="stable")
    begins = np.searchsorted(hops[order], np.arange(hops.max() + 2))
    bounds = tuple(begins.tolist())
    number = np.empty(total + 1, dtype=np.int64)  # position of every listed pass in `order`
    number[order] = np.arange(total)
    number[total] = total
    last_listed = np.arange(pp) * length + length - 1
    frames = _frames(schedule, orders, source.reshape(pp, length), chunks)
    waits = {"previous": number[previous[order]], "source": number[source[order]]}
    durations = _durations(kind, stage, stages)[order]
    messages = _messages(PLACES[kind], stage, stages)[order]
    return Graph(
        num_micro_batches,
        listed[order],
        bounds,
        **waits,
        duration=durations,
        message=messages,
        last=number[last_listed],
        frames=number[frames],
    )


@lru_cache(maxsize=CACHED_ORDERS)
def _orders(
    schedule: str,
    pp: int,
    num_micro_batches: int,
    chunks: int,
) -> Indices:
    """Return kind, stage and micro-batch of the passes of every device in order, `(pp, N / pp, 3)`."""
    known = find(schedule)
    number = {kind: index for index, kind in enumerate(known.kinds)}
    rows = []
    for order in known.orders(pp, num_micro_batches, chunks):
        row = []
        for kind, stage, batch in order:
            row.append((number[kind], stage, batch))
            if number[kind] == WHOLE:
                row.append((NOTHING, stage, batch))
        rows.append(row)
    return np.array(rows)


def _waits(orders: Indices, stages: int) -> tuple[Indices, Indices]:
    """Return the pass before each one on its device, and the one that gives its input; N: none."""
    listed = orders.reshape(-1, 3)
    kind, stage, batch = listed.T
    kind = PLACES[kind]
    total = len(listed)
    length = orders.shape[1]
    count = int(batch.max()) + 1
    place = np.full(3 * stages * count + 1, total)  # position of the pass of every code
    place[(kind * stages + stage) * count + batch] = np.arange(total)
    here = np.arange(total)
    previous = np.where(here % length, here - 1, total)
    return previous, place[_sources(kind, stage, batch, stages, count)]


def _sources(
    kind: Indices,
    stage: Indices,
    batch: Indices,
    stages: int,
    count: int,
) -> Indices:
    """Return the code of the pass that gives the input of each one; the largest code: none."""
    turns = (kind == BACKWARD) & (stage == stages - 1)  # follow the forward pass of their stage
    neighbour = np.where(kind == FORWARD, stage - 1, stage + 1)
    from_stage = np.where(turns, stage, neighbour)
    from_kind = np.where(turns, FORWARD, kind)
    codes = (from_kind * stages + from_stage) * count + batch
    # a gradient of the weights follows its backward pass in its device's order: it needs no source
    nothing = (kind == WEIGHT) | ((kind == FORWARD) & (stage == 0))
    return np.where(nothing, 3 * stages * count, codes)


def _durations(kind: Indices, stage: Indices, stages: int) -> Indices:
    """Return the row of the seconds of each pass."""
    rows: Indices = np.where(kind == WHOLE, 4 * stages + stage, kind * stages + stage)
    return np.where(kind == NOTHING, zero_row(stages), rows)


def _messages(kind: Indices, stage: Indices, stages: int) -> Indices:
    """Return the row of the message that each pass waits for."""
    boundary = np.where(kind == FORWARD, stage - 1, stage)
    none = (kind == WEIGHT) | (boundary < 0) | (boundary == stages - 1)
    return np.where(none, zero_row(stages), 3 * stages + boundary)


def _counted_hops(source: Indices, pp: int) -> Indices:
    """Return the passes on the longest path to each pass, `(N,)`; passes are listed device by device."""
    total = len(source)
    length = total // pp
    sources = source.tolist()
    hops = [UNKNOWN] * total
    hops.append(-1)  # of no pass
    waiting = [device * length for device in range(pp)]
    known = 0
    while known < total:
        before = known
        for device, here in enumerate(waiting):
            ahead = hops[here - 1] if here > device * length else -1
            end = (device + 1) * length
            while here < end and hops[sources[here]] != UNKNOWN:
                ahead = 1 + max(ahead, hops[sources[here]])
                hops[here] = ahead
                here += 1
            known += here - waiting[device]
            waiting[device] = here
        if known == before:
            raise PlanError(
                "schedule: the order of passes deadlocks, since every device waits for another one; "
                "try cost.schedule=1f1b."
            )
    return np.array(hops[:-1])


def _frames(
    schedule: str,
    order: Indices,
    source: Indices,
    chunks: int,
) -> Indices:
    """Return the passes at the end of the steady part, in rows that are one frame apart.

    On every device the steady part repeats the passes of one frame. It ends where the order of one
    more frame has another pass; from there that order is the shorter one with a frame inserted. A
    row holds, of every device, the passes for which anything after its steady part waits, moved
    back by whole frames. If a row ends a constant after another one, all later passes do so, too.

    Args:
        order: Kind, stage and micro-batch of every pass, device by device, `(pp, N / pp, 3)`.
        source: Position of the pass that gives the input, `(pp, N / pp)`; N: none.
        chunks: Stages of each device.
    """
    none = np.zeros((0, 0), dtype=np.int64)
    pp, length, _ = order.shape
    known = find(schedule)
    count = int(order[..., 2].max()) + 1
    step = known.frame_batches(pp)
    if known.linear or not known.repeats or count < 2 * pp:
        return none
    longer = _orders(schedule, pp, count + step, chunks)
    frame = longer.shape[1] - length
    one_frame_later = np.array([0, 0, step])
    differs = (order != longer[:, :length]).any(-1)
    end = np.where(differs.any(1), differs.argmax(1), length)
    for device, stop in enumerate(end):
        drain = order[device, stop:] + one_frame_later
        if (longer[device, stop + frame :] != drain).any():
            return none
    need = _needed(longer, source, end, frame, pp * chunks)
    rows = known.longest_period(pp) + 1
    for device, stop in enumerate(end.tolist()):
        moved = order[device, :-frame] + one_frame_later
        repeats = (order[device, frame:] == moved).all(-1)[: stop - frame]
        steady = len(repeats) if repeats.all() else int(repeats[::-1].argmin())
        rows = min(rows, (steady - stop + int(need[device])) // frame + 1)
    if rows < 2:
        return none
    last = np.concatenate([np.arange(need[d], end[d]) + d * length for d in range(pp)])
    return last - frame * np.arange(rows)[::-1, None]


def _needed(
    longer: Indices,
    source: Indices,
    end: Indices,
    frame: int,
    stages: int,
) -> Indices:
    """Return the first pass of every device for which its drain, or the added frame, waits, `(pp,)`."""
    pp, length = source.shape
    kind, stage, batch = longer.reshape(-1, 3).T
    count = int(batch.max()) + 1
    place = np.full(3 * stages * count + 1, -1)
    place[(kind * stages + stage) * count + batch] = np.arange(pp * (length + frame))
    need = end - 1
    for device, stop in enumerate(end.tolist()):
        inserted = longer[device, stop : stop + frame]
        kind, stage, batch = inserted.T
        givers = place[_sources(kind, stage, batch, stages, count)]
        needed = [divmod(at, length + frame) for at in givers[givers >= 0].tolist()]
        drain = source[device, stop:]
        needed += [divmod(at, length) for at in drain[drain < pp * length].tolist()]
        for other, at in needed:
            if at < end[other]:
                need[other] = min(need[other], at)
    return need
