"""Seconds of a pipeline by its schedule: the longest path through the order of passes.

A pass begins when the pass before it on its device has ended and its input is there. Ends are therefore a
max-plus recursion (Baccelli et al. 1992, Synchronization and Linearity), which is exact for uneven stages
and piecewise linear: gradients run along the critical path. Passes that are equally many hops away from
the start are computed at once, for all plans of a batch.

Many micro-batches repeat one *frame* of passes. Where all passes of a frame end a constant after those of
the frame before, they do so for ever, since the recursion is linear in the max-plus sense; then the frames
in between are left out, and the result is exact. Where that never happens every micro-batch is simulated.

As a linear cost the seconds are a maximum over paths of sums of passes. How often the longest path takes
each stage's forward, backward, weight pass, message and synchronisation is the gradient of the seconds in
them: their criticality. Held fixed, these counts make the cost linear in the stages' seconds. Since every
path is a lower bound of the longest one, the largest of several remembered paths is a lower bound too, exact
where one of them was taken (a cutting-plane model, Kelley 1960, The cutting-plane method for solving convex
programs).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.schedule_graph import NOTHING, Graph, Indices, compiled
from darts_parallel.schedules import Operation, find

Floats = NDArray[np.float64]

STEADY = 1e-13
"""Relative; steps of a steady state that differ by rounding alone."""
AT_ONCE = 200
"""Passes of all plans, by levels of the graph, up to which all are asked at once what they waited for."""
MAX_NUMBERS = 2**22
"""Numbers that one pass over a batch holds at a time."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch on every stage, for B plans; `Schedule.devices` names the devices."""

    forward: Tensor
    """Shape `(B, S)`."""
    backward: Tensor
    """The whole backward pass, `(B, S)`."""
    weight_gradient: Tensor
    """The part of `backward` that only the optimizer waits for, `(B, S)`."""
    message: Tensor
    """From a stage to the next, one way, next to which devices compute, `(B, S - 1)`."""

    def __getitem__(self, index: Tensor | slice) -> "PassSeconds":
        return PassSeconds(*(values[index] for values in vars(self).values()))

    def blocking(self) -> "PassSeconds":
        """Add messages to the passes of the later stage, which they occupy in both directions."""
        waits, none = torch.nn.functional.pad(self.message, (1, 0)), torch.zeros_like(self.message)
        return PassSeconds(self.forward + waits, self.backward + waits, self.weight_gradient, none)

    def rows(self, split: bool) -> Tensor:
        """Return all seconds one below the other, `(5 S, B)`: F, B, W, messages, a row of zeros, whole B."""
        weight = self.weight_gradient if split else torch.zeros_like(self.weight_gradient)
        nothing = torch.zeros_like(self.forward[:, :1])
        parts = [self.forward, self.backward - weight, weight, self.message, nothing, self.backward]
        return torch.cat(parts, dim=1).T


class Event(NamedTuple):
    """A pass with its seconds from the start of the iteration."""

    device: int
    operation: Operation
    start: float
    end: float


def device_ends(
    passes: PassSeconds, schedule: str, pp: int, num_micro_batches: int, *, whole: bool = False
) -> Tensor:
    """Return the seconds from the start of an iteration until every device has ended its last pass.

    Differentiable once; a gradient is that of one critical path.

    Args:
        passes: Of B plans with S stages, a multiple of `pp`.
        pp: Devices.
        num_micro_batches: The same for all plans.
        whole: Go through every pass even where passes repeat: a gradient then counts those of one path.

    Returns:
        Shape `(B, pp)`.

    Errors:
        UnsupportedError: the schedule does not exist for these numbers.
    """
    rows = passes.rows(find(schedule).split)
    chunks = passes.forward.shape[1] // pp
    if whole:
        return _ends(rows, compiled(schedule, pp, num_micro_batches, chunks)).T
    if find(schedule).linear and num_micro_batches > 2:
        one, two = (_ends(rows, compiled(schedule, pp, count, chunks)) for count in (1, 2))
        return (two + (num_micro_batches - 2) * (two - one)).T
    result = torch.zeros(pp, rows.shape[1], dtype=rows.dtype)
    for index, ends in _solved(rows, schedule, pp, num_micro_batches, chunks):
        result = result.index_copy(1, index, ends)
    return result.T


def _solved(
    rows: Tensor, schedule: str, pp: int, num_micro_batches: int, chunks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield plans `(b,)` and the ends of their devices `(pp, b)`, until every plan is done."""
    step, longest = find(schedule).frame_batches(pp), find(schedule).longest_period(pp)
    still = torch.arange(rows.shape[1])
    for count in _growing(schedule, pp, num_micro_batches):
        graph = compiled(schedule, pp, count, chunks)
        frames_left = (num_micro_batches - count) // step
        waiting = []
        for index in torch.tensor_split(still, _parts(still, graph)):
            run = _run(graph, rows[:, index].detach().numpy())
            if frames_left == 0:
                yield index, _ends(rows[:, index], graph, run)
                continue
            period = _period(graph, run[0], longest)
            waiting.append(index[torch.from_numpy(period == 0)])
            for length in np.unique(period[period > 0]).tolist():
                some = index[torch.from_numpy(period == length)]
                # as many more frames as leave out whole periods
                more = compiled(schedule, pp, count + step * (frames_left % length), chunks)
                yield some, _continued(rows[:, some], more, frames_left // length, length)
        still = torch.cat(waiting) if waiting else still[:0]
        if not len(still):
            return


def _parts(plans: Tensor, graph: Graph) -> int:
    """Return the number of parts of a batch that are small enough to be simulated at once."""
    return -(-max(len(plans), 1) * len(graph) // MAX_NUMBERS)


def _continued(rows: Tensor, graph: Graph, periods: int, length: int) -> Tensor:
    """Return the ends `(pp, B)` after `periods` more periods of `length` frames than the graph has."""
    run = _run(graph, rows.detach().numpy())
    wanted = np.concatenate([graph.last, graph.frames[[-1, -1 - length], 0]])
    ends: Tensor = _Longest.apply(rows, graph, run, wanted)  # type: ignore[no-untyped-call]
    return ends[:-2] + periods * (ends[-2] - ends[-1])


def simulated_seconds(
    passes: PassSeconds,
    sync: Tensor,
    counts: Tensor,
    pp: int,
    model: PipelineModel,
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the seconds of an iteration in which every device synchronises once its last backward has ended.

    Args:
        passes: Of B plans.
        sync: Gradient synchronisation and optimizer of every device, `(B, pp)`.
        counts: Micro-batches, `(B,)`.
        pp: Devices.
        whole: As in `device_ends`.

    Returns:
        Seconds of the iteration, `(B,)`, and until each device has ended its last pass, `(B, pp)`.
    """
    passes = passes.blocking() if model.blocking else passes
    ends = torch.zeros_like(sync)
    for count in sorted(set(counts.tolist())):
        index = torch.nonzero(counts == count).squeeze(1)
        some = device_ends(passes[index], model.schedule, pp, count, whole=whole)
        ends = ends.index_copy(0, index, some)
    if model.together:
        ends = ends.amax(1, keepdim=True).expand_as(ends)
    return ends.amax(1) + sync.amax(1) if model.together else (ends + sync).amax(1), ends


def timeline(passes: PassSeconds, schedule: str, pp: int, num_micro_batches: int) -> list[Event]:
    """Return every pass of one plan with its start and end, in an order that respects every dependency.

    Args:
        passes: Of one plan, `B = 1`.
        schedule, pp, num_micro_batches: As in `device_ends`.
    """
    graph = compiled(schedule, pp, num_micro_batches, passes.forward.shape[1] // pp)
    devices = find(schedule).devices(pp, passes.forward.shape[1])
    rows = passes.rows(find(schedule).split).detach().numpy()
    starts = _run(graph, rows)[1][:, 0].tolist()
    seconds = rows[graph.duration, 0].tolist()
    return [
        Event(
            devices[stage],
            Operation(find(schedule).kinds[kind], stage, batch),
            start,
            start + length,
        )
        for (kind, stage, batch), start, length in zip(
            graph.operations.tolist(), starts, seconds, strict=True
        )
        if kind != NOTHING
    ]


def critical_operations(
    passes: PassSeconds, schedule: str, pp: int, num_micro_batches: int, sync: Tensor
) -> frozenset[Operation]:
    """Return the passes of one longest path of one plan, from the start to the device that is awaited.

    Args:
        passes: Of one plan, `B = 1`.
        schedule, pp, num_micro_batches: As in `device_ends`.
        sync: Seconds of every device after its last pass, `(pp,)`.
    """
    graph = compiled(schedule, pp, num_micro_batches, passes.forward.shape[1] // pp)
    end, start = _run(graph, passes.rows(find(schedule).split).detach().numpy())
    awaited = int((end[graph.last, 0] + sync.detach().numpy()).argmax())
    paths, _ = _critical_paths(
        graph, end, start, graph.last[[awaited]], np.zeros(1, dtype=np.int64)
    )
    on_path = graph.operations[paths[paths < len(graph)]].tolist()
    kinds = find(schedule).kinds
    return frozenset(
        Operation(kinds[kind], s, batch) for kind, s, batch in on_path if kind != NOTHING
    )


def _growing(schedule: str, pp: int, num_micro_batches: int) -> Iterator[int]:
    """Yield rising numbers of micro-batches to try, whole frames fewer than all; at last all."""
    step = find(schedule).frame_batches(pp)
    tried = step * (6 if step > 1 else 3 * pp)
    repeats = find(schedule).repeats and not find(schedule).linear
    while 3 * tried < 2 * num_micro_batches and repeats:
        yield tried
        tried *= 3
    yield num_micro_batches


def _period(graph: Graph, end: Floats, longest: int) -> Indices:
    """Return frames after which the passes of each plan repeat a constant later, `(B,)`; 0: not yet.

    Args:
        end: Ends of all passes, `(N + 1, B)`.
    """
    times = end[graph.frames]
    slack = STEADY * end[graph.last].max(0)
    period = np.zeros(end.shape[1], dtype=np.int64)
    for length in range(min(longest, len(times) - 1), 0, -1):
        step = times[-1] - times[-1 - length]
        period[(np.abs(step - step[0]) <= slack).all(0)] = length
    return period


def _ends(rows: Tensor, graph: Graph, run: tuple[Floats, Floats] | None = None) -> Tensor:
    """Return the ends of the last passes of the devices, `(pp, B)`."""
    known = _run(graph, rows.detach().numpy()) if run is None else run
    result: Tensor = _Longest.apply(rows, graph, known, graph.last)  # type: ignore[no-untyped-call]
    return result


def _run(graph: Graph, rows: Floats) -> tuple[Floats, Floats]:
    """Return the ends of all passes, `(N + 1, B)` with a last row of zeros, and their starts, `(N, B)`."""
    return pass_ends(graph, rows[graph.duration], rows[graph.message])


def pass_ends(graph: Graph, duration: Floats, message: Floats) -> tuple[Floats, Floats]:
    """Return the ends of all passes where each has seconds of its own.

    Args:
        graph: Of N passes.
        duration: Seconds of every pass, `(N, B)`.
        message: Seconds of the message that every pass waits for, `(N, B)`; is overwritten.

    Returns:
        Ends, `(N + 1, B)` with a last row of zeros, and starts, `(N, B)`.
    """
    end = np.zeros((len(graph) + 1, duration.shape[1]))
    start, waits = message, np.empty((graph.widest, duration.shape[1]))
    # `clip` takes rows without a check of their numbers
    for cut, previous, source in graph.levels:
        ready, before = start[cut], waits[: len(previous)]
        end.take(source, axis=0, out=before, mode="clip")
        ready += before
        end.take(previous, axis=0, out=before, mode="clip")
        np.maximum(ready, before, out=ready)
        np.add(ready, duration[cut], out=end[cut])
    return end, start


class _Longest(torch.autograd.Function):
    """Ends of some passes, and how often the longest path to each takes every row of seconds."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, graph: Graph, run: tuple[Floats, Floats], wanted: Indices
    ) -> Tensor:
        ctx.graph, ctx.run, ctx.wanted = graph, run, wanted
        ctx.num_rows = len(rows)
        return torch.from_numpy(run[0][wanted])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        graph, (end, start) = ctx.graph, ctx.run
        weight = upstream.numpy()
        which, plan = np.nonzero(weight)
        result = np.zeros((ctx.num_rows, end.shape[1]))
        paths, by_message = _critical_paths(graph, end, start, ctx.wanted[which], plan)
        shape, total = result.shape, result.size
        weights = np.broadcast_to(weight[which, plan], paths.shape)
        for rows, counted in ((graph.duration, paths < len(graph)), (graph.message, by_message)):
            cells = rows[paths[counted]] * shape[1] + np.broadcast_to(plan, paths.shape)[counted]
            result += np.bincount(cells, weights[counted], minlength=total).reshape(shape)
        result[4 * len(result) // 5 - 1] = 0.0
        return torch.from_numpy(result), None, None, None


def _critical_paths(
    graph: Graph, end: Floats, start: Floats, last: Indices, plan: Indices
) -> tuple[Indices, NDArray[np.bool_]]:
    """Return the longest paths to some passes, from their ends back to the start.

    Args:
        end, start: Of all passes of all plans, as `pass_ends` gives them.
        last: Pass at which each path ends, `(E,)`.
        plan: Plan of each, `(E,)`.

    Returns:
        Passes, `(H, E)` with N where a path has begun already, and whether each waited for its message.
    """
    count, plans = start.shape
    if count * plans > AT_ONCE * len(graph.bounds):
        return _walked_paths(graph, end, start, last, plan)
    late = start > end[graph.previous]
    follows = np.where(late, graph.source[:, None], graph.previous[:, None])
    # as places in one flat array, so that a hop is a single look-up
    follows *= plans
    follows += np.arange(plans)
    flat = np.concatenate([follows.reshape(-1), count * plans + np.arange(plans)])
    here = last * plans + plan
    hops = [here]
    while len(here) and (here < count * plans).any():
        here = flat[here]
        hops.append(here)
    places = np.stack(hops)
    paths = places // plans
    waited = np.concatenate([late.reshape(-1), np.zeros(plans, dtype=bool)])[places]
    return paths, waited


def _walked_paths(
    graph: Graph, end: Floats, start: Floats, last: Indices, plan: Indices
) -> tuple[Indices, NDArray[np.bool_]]:
    """Return the paths of `_critical_paths`, looking up dependencies of the passes on them alone."""
    count = len(graph)
    previous, source = (np.append(waits, count) for waits in (graph.previous, graph.source))
    here, paths, waited = last, [last], []
    while (here < count).any():
        late = (start[np.minimum(here, count - 1), plan] > end[previous[here], plan]) & (
            here < count
        )
        here = np.where(late, source[here], previous[here])
        paths.append(here)
        waited.append(late)
    return np.stack(paths), np.stack([*waited, np.zeros(len(last), dtype=bool)])


@dataclass(frozen=True)
class Criticalities:
    """How often the longest paths of B plans take each of their rows of seconds."""

    forward: Tensor
    """Times that the stage's forward pass lies on the path, `(B, S)`."""
    backward: Tensor
    weight_gradient: Tensor
    message: Tensor
    """Shape `(B, S - 1)`."""
    sync: Tensor
    """Shape `(B, pp)`; 1 for the device that the iteration waits for."""

    @staticmethod
    def of(
        passes: PassSeconds,
        sync: Tensor,
        counts: Tensor,
        pp: int,
        model: PipelineModel,
        whole: bool = False,
    ) -> "Criticalities":
        """Count those of one longest path of each plan; arguments as in `simulated_seconds`.

        With `whole` they are a path through the schedule, else possibly one and its repetition beyond it.
        """
        leaves = [row.detach().clone().requires_grad_() for row in (*vars(passes).values(), sync)]
        with torch.enable_grad():
            some = PassSeconds(*leaves[:4])
            total, _ = simulated_seconds(some, leaves[4], counts, pp, model, whole=whole)
        given = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
        rows = zip(leaves, given, strict=True)
        return Criticalities(
            *(torch.zeros_like(leaf) if row is None else row for leaf, row in rows)
        )

    def seconds(self, passes: PassSeconds, sync: Tensor) -> Tensor:
        """Return the seconds along the paths, at most those of the schedule, `(B,)`."""
        counted = zip(vars(self).values(), (*vars(passes).values(), sync), strict=True)
        total: Tensor = reduce(torch.add, ((count * seconds).sum(-1) for count, seconds in counted))
        return total

    def awaited(self, sync: Tensor) -> Tensor:
        """Return the synchronisation seconds on the path, `(B,)`."""
        return (self.sync * sync).sum(-1)


@dataclass
class PathMemory:
    """Critical paths of the relaxed plans of one batch, simulated again every few steps."""

    every: int
    """Steps between simulations."""
    keep: int = 4
    """Paths that are remembered of every plan."""
    steps: int = field(default=0, init=False)
    paths: list[Criticalities] = field(default_factory=list, init=False)

    def seconds(
        self, passes: PassSeconds, sync: Tensor, counts: Tensor, pp: int, model: PipelineModel
    ) -> tuple[Tensor, Tensor]:
        """Return the seconds of an iteration along the longest remembered path, differentiable.

        Args:
            passes, sync, counts, pp, model: As in `simulated_seconds`, of the same B plans at
                every call.

        Returns:
            Seconds, and the synchronisation among them, each `(B,)`. Exact in steps that simulate.
        """
        if self.steps % self.every == 0:
            newest = Criticalities.of(passes, sync, counts, pp, model)
            self.paths = [*self.paths[1 - self.keep :], newest] if self.keep > 1 else [newest]
        self.steps += 1
        values = torch.stack([path.seconds(passes, sync) for path in self.paths])
        awaited = torch.stack([path.awaited(sync) for path in self.paths])
        total, longest = values.max(0)
        return total, awaited.gather(0, longest.unsqueeze(0)).squeeze(0)

    def forget(self) -> None:
        """Simulate at the next step: the plans have become others."""
        self.steps, self.paths = 0, []
