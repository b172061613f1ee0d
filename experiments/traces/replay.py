"""A recorded step from its own seconds of computation, without any waiting.

Forward and backward passes take what was recorded; when each may begin follows from the schedule alone
(`darts_parallel.cost.simulation`, the longest path). No send and no receive is read: a receive holds the
waiting that the replay is to find. After its last backward a device joins the collectives of the step's end;
of each the shortest recorded duration among its ranks counts, since the rank that comes last waits for
nobody.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from darts_parallel.cost.schedule_graph import Graph, compiled
from darts_parallel.cost.simulation import pass_ends
from darts_parallel.errors import ConfigError
from darts_parallel.schedules import Operation, find
from experiments.traces.recorded import BACKWARD, FORWARD, Entry, RecordedStep

Floats = NDArray[np.float64]

KNOWN = ("1f1b", "gpipe")
"""Schedules that a recorded order is compared with."""
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SCATTER, CLIP, OPTIMIZER = "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"


def predicted_seconds(step: RecordedStep) -> float:
    """Seconds from the beginning of the first forward pass to the end of the optimizer.

    Errors:
        ConfigError: the recorded passes are no whole step of a known schedule.
    """
    forward, backward = _by_place(step, FORWARD), _by_place(step, BACKWARD)
    if forward.shape != backward.shape:
        raise _incomplete(step)
    pp, count = forward.shape[1:]
    graph = compiled(_schedule(step, pp, count), pp, count, 1)
    return _after_passes(step, pipeline_ends(graph, forward, backward))


def pipeline_ends(graph: Graph, forward: Floats, backward: Floats) -> Floats:
    """Seconds until every device has ended its last pass, shape `(dp, pp)`.

    Args:
        graph: A schedule of one stage a device.
        forward: Seconds of every pass, `(dp, pp, m)`.
        backward: The same of the whole backward passes.
    """
    kind, stage, batch = graph.operations.T
    both = np.stack([forward, backward])
    duration = both[kind, :, stage, batch]
    ends, _ = pass_ends(graph, duration, np.zeros_like(duration))
    return np.asarray(ends[graph.last].T)


def _by_place(step: RecordedStep, kind: str) -> Floats:
    """Seconds of the passes of a kind, `(dp, pp, m)`."""
    entries = step.entries[kind]
    shape = [1 + max(values) for values in zip(*(entry[:3] for entry in entries), strict=True)]
    seconds = np.full(shape, np.nan)
    for entry in entries:
        if min(entry[:3]) < 0 or not np.isnan(seconds[entry[:3]]):
            raise _incomplete(step)
        seconds[entry[:3]] = entry.duration
    if np.isnan(seconds).any():
        raise _incomplete(step)
    return seconds


def _incomplete(step: RecordedStep) -> ConfigError:
    return ConfigError(
        f"trace {step.trace}: step {step.step} must hold one forward and one backward pass of every rank, "
        "stage and micro-batch; try a whole step."
    )


def _schedule(step: RecordedStep, pp: int, count: int) -> str:
    """The schedule whose order of passes every rank followed."""
    recorded = _recorded_orders(step)
    for schedule in KNOWN:
        orders = find(schedule).orders(pp, count)
        if all(order == orders[stage] for (_, stage), order in recorded.items()):
            return schedule
    raise ConfigError(
        f"trace {step.trace}: the passes of step {step.step} must come in the order of {' or '.join(KNOWN)}; "
        "try 1f1b."
    )


def _recorded_orders(step: RecordedStep) -> dict[tuple[int, int], tuple[Operation, ...]]:
    """Passes of every data-parallel rank and stage in the order in which they began."""
    passes = [("F", entry) for entry in step.entries[FORWARD]]
    passes += [("B", entry) for entry in step.entries[BACKWARD]]
    orders: dict[tuple[int, int], list[Operation]] = {}
    for kind, entry in sorted(passes, key=lambda p: p[1].start):
        own = orders.setdefault((entry.dp_rank, entry.stage), [])
        own.append(Operation(kind, entry.stage, entry.micro_batch))
    return {place: tuple(order) for place, order in orders.items()}


def _after_passes(step: RecordedStep, ends: Floats) -> float:
    """Seconds until the optimizer has ended everywhere.

    Tied embeddings are summed by the first and the last stage of a rank, gradients by all ranks of a
    stage, and the norm of the gradients by everybody.

    Args:
        ends: Of the passes, `(dp, pp)`.
    """
    ranks, stages = ends.shape
    time = ends + _shortest(step.entries.get(LAYERNORM, ()))
    if EMBEDDING in step.entries:
        outer = [0, stages - 1]
        for rank in range(ranks):
            own = [entry for entry in step.entries[EMBEDDING] if entry.dp_rank == rank]
            time[rank, outer] = time[rank, outer].max() + _shortest(own)
    for stage in range(stages):
        own = [entry for entry in step.entries.get(SCATTER, ()) if entry.stage == stage]
        time[:, stage] = time[:, stage].max() + _shortest(own)
    everybody = float(time.max()) + _shortest(step.entries.get(CLIP, ()))
    return everybody + max((entry.duration for entry in step.entries.get(OPTIMIZER, ())), default=0.0)


def _shortest(entries: Iterable[Entry]) -> float:
    """Seconds of a collective without waiting; none where it was not recorded."""
    return min((entry.duration for entry in entries), default=0.0)
