"""A pipeline schedule as arrays: dependencies of every pass, and its steady-state period.

Passes that are equally many hops away from the start form a level: none of them waits for another.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from darts_parallel.schedules import find

Indices = NDArray[np.int64]

FORWARD, BACKWARD, WEIGHT, WHOLE, NOTHING = range(5)
"""A backward pass is that of the input alone where the schedule splits it, or it is `WHOLE`: then `NOTHING`
stands for the weights' gradient, so that all devices have equally many passes."""
PLACES = np.array([FORWARD, BACKWARD, WEIGHT, BACKWARD, WEIGHT])
"""Kind in the place of which others wait for a pass, by kind."""


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
        return max(last - first for first, last in pairwise(self.bounds))

    @cached_property
    def levels(self) -> tuple[tuple[slice, Indices, Indices], ...]:
        """Passes, previous passes and sources of every level."""
        cuts = [slice(a, b) for a, b in pairwise(self.bounds)]
        return tuple((cut, self.previous[cut], self.source[cut]) for cut in cuts)


@lru_cache(maxsize=128)
def compiled(schedule: str, pp: int, num_micro_batches: int, chunks: int) -> Graph:
    """Return the graph of a schedule (a pure function, remembered).

    Args:
        schedule, pp, num_micro_batches: As in `device_ends`.
        chunks: Stages of each device.
    """
    stages = pp * chunks
    orders = _orders(schedule, pp, num_micro_batches, chunks)
    listed, (previous, source) = orders.reshape(-1, 3), _waits(orders, stages)
    kind, stage, _ = listed.T
    total, length = len(listed), len(listed) // pp
    hops = _counted_hops(source, pp)
    order = np.argsort(hops, kind="stable")
    number = np.empty(total + 1, dtype=np.int64)
    number[order], number[total] = np.arange(total), total
    return Graph(
        num_micro_batches=num_micro_batches,
        operations=listed[order],
        bounds=(*np.searchsorted(hops[order], np.arange(hops.max() + 2)).tolist(),),
        previous=number[previous[order]],
        source=number[source[order]],
        duration=_durations(kind, stage, stages)[order],
        message=_messages(PLACES[kind], stage, stages)[order],
        last=number[np.arange(pp) * length + length - 1],
        frames=number[_frames(schedule, orders, source.reshape(pp, length), chunks)],
    )


@lru_cache(maxsize=64)
def _orders(schedule: str, pp: int, num_micro_batches: int, chunks: int) -> Indices:
    """Return kind, stage and micro-batch of the passes of every device in order, `(pp, N / pp, 3)`."""
    orders = find(schedule).orders(pp, num_micro_batches, chunks)
    number = {kind: index for index, kind in enumerate(find(schedule).kinds)}
    numbered = [[(number[kind], stage, batch) for kind, stage, batch in order] for order in orders]
    split = {WHOLE: [WHOLE, NOTHING]}
    rows = [
        [(own, *rest) for kind, *rest in row for own in split.get(kind, [kind])] for row in numbered
    ]
    return np.array(rows)


def _waits(orders: Indices, stages: int) -> tuple[Indices, Indices]:
    """Return the pass before each one on its device, and the one that gives its input; N: none."""
    total, length, (kind, stage, batch) = (
        orders[..., 0].size,
        orders.shape[1],
        orders.reshape(-1, 3).T,
    )
    count, kind = int(batch.max()) + 1, PLACES[kind]
    place = np.full(3 * stages * count + 1, total)
    place[(kind * stages + stage) * count + batch] = np.arange(total)
    previous = np.where(np.arange(total) % length, np.arange(total) - 1, total)
    return previous, place[_sources(kind, stage, batch, stages, count)]


def _sources(kind: Indices, stage: Indices, batch: Indices, stages: int, count: int) -> Indices:
    """Return the code of the pass that gives the input of each one; the largest code: none."""
    last = (kind == BACKWARD) & (stage == stages - 1)
    from_stage = np.where(last, stage, np.where(kind == FORWARD, stage - 1, stage + 1))
    codes = (np.where(last, FORWARD, kind) * stages + from_stage) * count + batch
    # its device's order puts a gradient of the weights after the backward that it continues
    nothing = (kind == WEIGHT) | ((kind == FORWARD) & (stage == 0))
    sources: Indices = np.where(nothing, 3 * stages * count, codes)
    return sources


def _durations(kind: Indices, stage: Indices, stages: int) -> Indices:
    """Return the row of the seconds of each pass."""
    rows: Indices = np.where(kind == WHOLE, 4 * stages + stage, kind * stages + stage)
    return np.where(kind == NOTHING, 4 * stages - 1, rows)


def _messages(kind: Indices, stage: Indices, stages: int) -> Indices:
    """Return the row of the message that each pass waits for; the last row is zero."""
    boundary = np.where(kind == FORWARD, stage - 1, stage)
    none = (kind == WEIGHT) | (boundary < 0) | (boundary == stages - 1)
    rows: Indices = np.where(none, 4 * stages - 1, 3 * stages + boundary)
    return rows


def _counted_hops(source: Indices, pp: int) -> Indices:
    """Return the passes on the longest path to each pass, device by device, `(N,)`."""
    total = len(source)
    hops, sources = [-1] * total + [0], source.tolist()
    length = total // pp
    waiting, known = [device * length for device in range(pp)], 0
    while known < total:
        before = known
        for device in range(pp):
            here, end = waiting[device], (device + 1) * length
            ahead = hops[here - 1] if here > device * length else -1
            while here < end and (hops[sources[here]] >= 0):
                needed = hops[sources[here]] if sources[here] < total else -1
                ahead = hops[here] = 1 + max(ahead, needed)
                here += 1
            known += here - waiting[device]
            waiting[device] = here
        if known == before:
            raise AssertionError("the order of passes waits for itself")
    return np.array(hops[:-1])


def _frames(schedule: str, order: Indices, source: Indices, chunks: int) -> Indices:
    """Return the passes at the end of the steady part, in rows that are one frame apart.

    On every device the steady part repeats the passes of one frame. It ends where the order for one frame
    more has another pass; from there that order is the shorter one with a frame put in. A row holds, of every
    device, the passes on which anything after its steady part waits, moved back by whole frames. Where a row
    ends a constant after another one, so does, pass by pass, all that follows.

    Args:
        order: Kind, stage and micro-batch of every pass, device by device, `(pp, N / pp, 3)`.
        source: Place of the pass that gives the input, `(pp, N / pp)`; N: none.
        chunks: Stages of each device.
    """
    none, (pp, length, _) = np.zeros((0, 0), dtype=np.int64), order.shape
    known, count = find(schedule), int(order[..., 2].max()) + 1
    step = known.frame_batches(pp)
    if known.linear or not known.repeats or count < 2 * pp:
        return none
    longer = _orders(schedule, pp, count + step, chunks)
    frame, later = longer.shape[1] - length, np.array([0, 0, step])
    differs = (order != longer[:, :length]).any(-1)
    end = np.where(differs.any(1), differs.argmax(1), length)
    rows = known.longest_period(pp) + 1
    for device in range(pp):
        if (longer[device, end[device] + frame :] != order[device, end[device] :] + later).any():
            return none
    need = _needed(longer, source, end, frame, pp * chunks)
    for device in range(pp):
        repeats = (order[device, frame:] == order[device, :-frame] + later).all(-1)[
            : end[device] - frame
        ]
        steady = len(repeats) if repeats.all() else int(repeats[::-1].argmin())
        rows = min(rows, (steady - int(end[device] - need[device])) // frame + 1)
    if rows < 2:
        return none
    last = np.concatenate([np.arange(need[d], end[d]) + d * length for d in range(pp)])
    frames: Indices = last - frame * np.arange(rows)[::-1, None]
    return frames


def _needed(longer: Indices, source: Indices, end: Indices, frame: int, stages: int) -> Indices:
    """Return the first pass of every device on which its drain, or the added frame, waits, `(pp,)`."""
    need, (pp, length), (kind, stage, batch) = end - 1, source.shape, longer.reshape(-1, 3).T
    count = int(batch.max()) + 1
    place = np.full(3 * stages * count + 1, -1)
    place[(kind * stages + stage) * count + batch] = np.arange(pp * (length + frame))
    for device in range(pp):
        inserted = longer[device, end[device] : end[device] + frame]
        givers = place[_sources(inserted[:, 0], inserted[:, 1], inserted[:, 2], stages, count)]
        asked = [divmod(at, length + frame) for at in givers[givers >= 0].tolist()]
        drain = source[device, end[device] :]
        asked += [divmod(int(at), length) for at in drain[drain < pp * length]]
        for other, at in asked:
            if at < end[other]:
                need[other] = min(need[other], at)
    return need
