"""Seconds of a pipeline by its schedule: the longest path through the order of passes.

A pass begins when the pass before it on its device has ended and its input is there. Ends are
therefore a max-plus recursion (Baccelli et al. 1992, Synchronization and Linearity), which is exact
for uneven stages and piecewise linear: gradients run along the critical path. Passes that are
equally many hops away from the start are computed at once, for all plans of a batch.

The seconds are a maximum over paths of sums of passes. A criticality counts how often the longest
path takes a stage's forward, backward, weight pass, message or synchronisation: it is the gradient
of the seconds. With fixed counts the cost is linear in the stages' seconds. Every path is a lower
bound of the longest one, so the largest of several remembered paths is a lower bound, too. It is
exact where one of them is the longest (a cutting-plane model, Kelley 1960, The cutting-plane method
for solving convex programs).
"""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.rows import Rows, flatnonzero
from darts_parallel.cost.schedule_graph import (
    NOTHING,
    ROWS_PER_STAGE,
    Graph,
    compiled,
    zero_row,
)
from darts_parallel.cost.stage_costs import Array, Bools, Index
from darts_parallel.schedules import Operation, find

MAX_NUMBERS = 2**22
"""Numbers that one pass over a batch holds at a time."""


@dataclass(frozen=True)
class PassSeconds(Rows):
    """Seconds of one micro-batch on every stage, for B plans; `Schedule.devices` names the devices."""

    forward: Tensor
    """Shape `(B, S)`."""
    backward: Tensor
    """The whole backward pass, `(B, S)`."""
    weight_gradient: Tensor
    """The part of `backward` that only the optimizer waits for, `(B, S)`."""
    message: Tensor
    """From a stage to the next, one way; devices compute meanwhile, `(B, S - 1)`."""

    def blocking(self) -> "PassSeconds":
        """Add messages to the passes of the later stage, which they occupy in both directions."""
        waits = torch.nn.functional.pad(self.message, (1, 0))
        none = torch.zeros_like(self.message)
        return PassSeconds(self.forward + waits, self.backward + waits, self.weight_gradient, none)

    def rows(self, split: bool) -> Tensor:
        """Return all seconds in the rows of `schedule_graph`, `(5 S, B)`.

        Args:
            split: Whether the schedule computes the weights' gradients in passes of their own.
        """
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
    critical: bool
    """It is on a longest path, to the device that the iteration waits for."""


def device_ends(
    passes: PassSeconds,
    schedule: str,
    pp: int,
    num_micro_batches: int,
) -> Tensor:
    """Return the seconds from the start of an iteration until every device has ended its last pass.

    Differentiable once; the gradient counts the passes of a critical path.

    Args:
        passes: Of B plans with S stages, a multiple of `pp`.
        pp: Devices.
        num_micro_batches: The same for all plans.

    Returns:
        Shape `(B, pp)`.

    Errors:
        UnsupportedError: the schedule does not exist for these numbers.
    """
    rows = passes.rows(find(schedule).split)
    chunks = passes.forward.shape[1] // pp
    graph = compiled(schedule, pp, num_micro_batches, chunks)
    # parts of the batch are small enough to be simulated at once
    count = ceil(max(rows.shape[1], 1) * len(graph) / MAX_NUMBERS)
    ends = []
    for part in torch.tensor_split(rows, count, dim=1):
        run = _run(graph, part.detach().numpy())
        ends.append(_Longest.apply(part, graph, run))  # type: ignore[no-untyped-call]
    return torch.cat(ends, dim=1).T


def simulated_seconds(
    passes: PassSeconds,
    sync: Tensor,
    counts: Tensor,
    model: PipelineModel,
) -> tuple[Tensor, Tensor]:
    """Return the seconds of an iteration; every device synchronises after its last backward.

    Args:
        passes: Of B plans.
        sync: Gradient synchronisation and optimizer of every device, `(B, pp)`.
        counts: Micro-batches, `(B,)`.

    Returns:
        Seconds of the iteration, `(B,)`, and until each device has ended its last pass, `(B, pp)`.
    """
    passes = passes.blocking() if model.blocking else passes
    ends = torch.zeros_like(sync)
    for count in sorted(set(counts.tolist())):
        index = flatnonzero(counts == count)
        some = device_ends(passes[index], model.schedule, sync.shape[1], count)
        ends = ends.index_copy(0, index, some)
    if model.together:
        last = ends.amax(1, keepdim=True)
        return last.squeeze(1) + sync.amax(1), last.expand_as(ends)
    return (ends + sync).amax(1), ends


def timeline(
    passes: PassSeconds,
    schedule: str,
    sync: Tensor,
    num_micro_batches: int,
) -> list[Event]:
    """Return every pass of one plan with its start and end, in an order that respects every dependency.

    Args:
        passes: Of one plan, `B = 1`.
        schedule, num_micro_batches: As in `device_ends`.
        sync: Seconds of every device after its last pass, `(pp,)`.
    """
    known = find(schedule)
    pp = len(sync)
    num_stages = passes.forward.shape[1]
    graph = compiled(schedule, pp, num_micro_batches, num_stages // pp)
    devices = known.devices(pp, num_stages)
    rows = passes.rows(known.split).detach().numpy()
    run = _run(graph, rows)
    ends = run.end[graph.last, 0]
    waits = sync.detach().numpy()
    awaited = int((ends + waits).argmax())
    first_plan = np.zeros(1, dtype=np.int64)
    paths = _critical_paths(graph, run, graph.last[[awaited]], first_plan)
    critical = set(paths.passes[:, 0].tolist())
    starts = run.start[:, 0].tolist()
    seconds = rows[graph.duration, 0].tolist()
    events = []
    for number, (kind, stage, batch) in enumerate(graph.operations.tolist()):
        if kind != NOTHING:
            operation = Operation(known.kinds[kind], stage, batch)
            start = starts[number]
            end = start + seconds[number]
            events.append(Event(devices[stage], operation, start, end, number in critical))
    return events


class PassTimes(NamedTuple):
    """Seconds from the start of the iteration, of the N passes of a graph and B plans."""

    end: Array
    """Shape `(N + 1, B)`; the last row is zero."""
    start: Array
    """Shape `(N, B)`."""


def _run(graph: Graph, rows: Array) -> PassTimes:
    """Return the times of all passes from the rows of `PassSeconds`."""
    return pass_ends(graph, rows[graph.duration], rows[graph.message])


def pass_ends(graph: Graph, duration: Array, message: Array) -> PassTimes:
    """Return the times of all passes if each has seconds of its own.

    Args:
        graph: Of N passes.
        duration: Seconds of every pass, `(N, B)`.
        message: Seconds of the message that every pass waits for, `(N, B)`; is overwritten.
    """
    plans = duration.shape[1]
    end = np.zeros((len(graph) + 1, plans))
    start = message
    buffer = np.empty((graph.widest, plans))
    # mode "clip" does not check the row numbers, which takes time
    for level in graph.levels:
        ready = start[level.passes]
        before = buffer[: len(level.previous)]
        end.take(level.source, axis=0, out=before, mode="clip")
        ready += before
        end.take(level.previous, axis=0, out=before, mode="clip")
        np.maximum(ready, before, out=ready)
        np.add(ready, duration[level.passes], out=end[level.passes])
    return PassTimes(end, start)


class _Longest(torch.autograd.Function):
    """Ends of the last passes; the gradient counts how often the longest path to each takes every row."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        graph: Graph,
        run: PassTimes,
    ) -> Tensor:
        ctx.graph = graph
        ctx.run = run
        ctx.num_rows = len(rows)
        return torch.from_numpy(run.end[graph.last])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        graph = ctx.graph
        weight = upstream.numpy()
        which, plan = np.nonzero(weight)
        paths = _critical_paths(graph, ctx.run, graph.last[which], plan)
        shape = (ctx.num_rows, weight.shape[1])
        weights = np.broadcast_to(weight[which, plan], paths.passes.shape)
        plans = np.broadcast_to(plan, paths.passes.shape)
        result = np.zeros(shape)
        on_path = paths.passes < len(graph)
        for row, counted in ((graph.duration, on_path), (graph.message, paths.by_message)):
            cells = row[paths.passes[counted]] * shape[1] + plans[counted]
            result += np.bincount(cells, weights[counted], minlength=result.size).reshape(shape)
        result[zero_row(len(result) // ROWS_PER_STAGE)] = 0.0
        return torch.from_numpy(result), None, None


class _Paths(NamedTuple):
    """E longest paths, from their ends back to the start, of at most H passes."""

    passes: Index
    """Shape `(H, E)`; N before the start of a path."""
    by_message: Bools
    """Whether each pass waited for its message, not for the pass before, `(H, E)`."""


def _critical_paths(
    graph: Graph,
    run: PassTimes,
    last: Index,
    plan: Index,
) -> _Paths:
    """Return the longest paths to some passes.

    Args:
        run: Times of all passes of all plans.
        last: Pass at which each path ends, `(E,)`.
        plan: Plan of each path, `(E,)`.
    """
    count = len(graph)
    previous = np.append(graph.previous, count)
    source = np.append(graph.source, count)
    here = last
    passes = [last]
    by_message = []
    while (here < count).any():
        started = run.start[np.minimum(here, count - 1), plan]
        late = (started > run.end[previous[here], plan]) & (here < count)
        here = np.where(late, source[here], previous[here])
        passes.append(here)
        by_message.append(late)
    by_message.append(np.zeros(len(last), dtype=bool))
    return _Paths(np.stack(passes), np.stack(by_message))


@dataclass(frozen=True)
class Criticalities:
    """How often the longest paths of B plans take each stage's passes, messages and synchronisation."""

    times: tuple[Tensor, ...]
    """Times that each of `PassSeconds` lies on the path; last of the synchronisation, `(B, pp)`: 1 for the
    device that the iteration waits for."""

    @staticmethod
    def of(
        passes: PassSeconds,
        sync: Tensor,
        counts: Tensor,
        model: PipelineModel,
    ) -> "Criticalities":
        """Count the passes of one longest path of each plan; arguments as in `simulated_seconds`."""
        leaves = [row.detach().clone().requires_grad_() for row in (*vars(passes).values(), sync)]
        with torch.enable_grad():
            copied = PassSeconds(*leaves[:4])
            total, _ = simulated_seconds(copied, leaves[4], counts, model)
        gradients = torch.autograd.grad(total.sum(), leaves, materialize_grads=True)
        return Criticalities(gradients)

    def seconds(self, passes: PassSeconds, sync: Tensor) -> Tensor:
        """Return the seconds along the paths, at most the seconds of the schedule, `(B,)`."""
        parts = zip(self.times, (*vars(passes).values(), sync), strict=True)
        return sum(((times * own).sum(-1) for times, own in parts), torch.zeros(()))

    def awaited(self, sync: Tensor) -> Tensor:
        """Return the synchronisation seconds on the path, `(B,)`."""
        return (self.times[-1] * sync).sum(-1)


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
        self,
        passes: PassSeconds,
        sync: Tensor,
        counts: Tensor,
        model: PipelineModel,
    ) -> tuple[Tensor, Tensor]:
        """Return the seconds of an iteration along the longest remembered path, differentiable.

        Args:
            passes, sync, counts, model: As in `simulated_seconds`, of the same B plans at every call.

        Returns:
            Seconds, and the part of them that is synchronisation, each `(B,)`. They are exact in
            steps that simulate.
        """
        if self.steps % self.every == 0:
            newest = Criticalities.of(passes, sync, counts, model)
            self.paths = [*self.paths, newest][-self.keep :]
        self.steps += 1
        values = torch.stack([path.seconds(passes, sync) for path in self.paths])
        awaited = torch.stack([path.awaited(sync) for path in self.paths])
        total, longest = values.max(0)
        return total, awaited.gather(0, longest.unsqueeze(0)).squeeze(0)
