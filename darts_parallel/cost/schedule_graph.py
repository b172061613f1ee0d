"""A pipeline schedule as arrays: dependencies of every pass.

Passes that are equally many hops away from the start form a level: none of them waits for another.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from darts_parallel.cost.stage_costs import Index
from darts_parallel.errors import PlanError
from darts_parallel.schedules import find

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
CACHED_GRAPHS = 128
"""Graphs that are remembered: more than one job's outer choices."""


def zero_row(stages: int) -> int:
    """Return the index of the row of zeros."""
    return 4 * stages - 1


class Level(NamedTuple):
    """Passes that are equally many hops from the start."""

    passes: slice
    previous: Index
    """The pass before each one on its device; N: none."""
    source: Index
    """The pass that gives each one its input; N: none."""


@dataclass(frozen=True)
class Graph:
    """A schedule as arrays; its N passes are sorted by their distance from the start in hops."""

    num_micro_batches: int
    operations: Index
    """Kind (index in `Schedule.kinds`), stage and micro-batch of every pass, `(N, 3)`."""
    bounds: tuple[int, ...]
    """First pass of every level, and N."""
    previous: Index
    """The pass before on the same device, `(N,)`; N: none."""
    source: Index
    """The pass that gives the input, `(N,)`; N: none."""
    duration: Index
    """Row of `PassSeconds.rows`, `(N,)`."""
    message: Index
    """Row of the message that brings the input, `(N,)`."""
    last: Index
    """Last pass of every device, `(pp,)`."""

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
    waits = {"previous": number[previous[order]], "source": number[source[order]]}
    rows = np.where(kind == WHOLE, 4 * stages + stage, kind * stages + stage)
    durations = np.where(kind == NOTHING, zero_row(stages), rows)
    messages = _messages(PLACES[kind], stage, stages)[order]
    return Graph(
        num_micro_batches,
        listed[order],
        bounds,
        **waits,
        duration=durations[order],
        message=messages,
        last=number[last_listed],
    )


def _orders(
    schedule: str,
    pp: int,
    num_micro_batches: int,
    chunks: int,
) -> Index:
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


def _waits(orders: Index, stages: int) -> tuple[Index, Index]:
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
    kind: Index,
    stage: Index,
    batch: Index,
    stages: int,
    count: int,
) -> Index:
    """Return the code of the pass that gives the input of each one; the largest code: none."""
    turns = (kind == BACKWARD) & (stage == stages - 1)  # follow the forward pass of their stage
    neighbour = np.where(kind == FORWARD, stage - 1, stage + 1)
    from_stage = np.where(turns, stage, neighbour)
    from_kind = np.where(turns, FORWARD, kind)
    codes = (from_kind * stages + from_stage) * count + batch
    # a gradient of the weights follows its backward pass in its device's order: it needs no source
    nothing = (kind == WEIGHT) | ((kind == FORWARD) & (stage == 0))
    return np.where(nothing, 3 * stages * count, codes)


def _messages(kind: Index, stage: Index, stages: int) -> Index:
    """Return the row of the message that each pass waits for."""
    boundary = np.where(kind == FORWARD, stage - 1, stage)
    none = (kind == WEIGHT) | (boundary < 0) | (boundary == stages - 1)
    return np.where(none, zero_row(stages), 3 * stages + boundary)


def _counted_hops(source: Index, pp: int) -> Index:
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
