"""Paths through a schedule, and the cheapest plan against a mixture of them.

Stages placed as a V: the two runs of layers of a device lie outside those of the next one.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from time import monotonic

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import (
    SOLVER_MEMORY_TOLERANCE,
    Array,
    CostTable,
    Criticalities,
    HardPlans,
    Index,
    evaluate_batch,
    pass_seconds,
    prefix_sums,
)
from darts_parallel.exact.segments import StageSegments
from darts_parallel.schedules import find


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of a device of two stages under several paths and prices, P, by the layers of its two runs."""

    first: Array
    """Sums over the first layers, of the first run, `(P, L + 1)`."""
    second: Array
    """Sums of the second run, `(P, L + 1)`."""
    ways: Array
    """Seconds added, by the layers before the first run, `(P, L + 1)`."""


@dataclass(frozen=True)
class _Step:
    """Runs of some lengths, in some places, that one device can hold."""

    before: int
    """Layers of the run on the way down."""
    behind: int
    rows: slice
    """Layers outside on the way down."""
    columns: slice
    """First layer outside on the way up."""
    allowed: NDArray[np.bool_]

    @property
    def behind_it(self) -> tuple[slice, slice]:
        """Return the states that it leads to."""
        return (
            slice(self.rows.start + self.before, self.rows.stop + self.before),
            slice(self.columns.start - self.behind, self.columns.stop - self.behind),
        )


@dataclass(frozen=True)
class FoldedSplits:
    """Splits none of whose devices takes more than a limit; a state is the layers outside on both sides."""

    begins: NDArray[np.bool_]
    """Layers that can begin a stage, and the end, `(L + 1,)`."""
    steps: list[list[_Step]]
    """Costs of every device."""
    slowest: Array
    """Least seconds of the slowest device by the layers before the V turns; infinite: no split is left."""

    @staticmethod
    def below(
        limit: float, begins: NDArray[np.bool_], devices: list[DeviceCosts]
    ) -> "FoldedSplits":
        """Return those whose devices all take at most `limit` seconds."""
        best, steps = np.full((len(begins), len(begins)), np.inf), list[list[_Step]]()
        best[0, -1] = 0.0
        for costs in devices:
            new, mine = np.full_like(best, np.inf), list[_Step]()
            top, low = _span(np.isfinite(best).any(1)), _span(np.isfinite(best).any(0))
            for before in range(1, len(begins)):
                rows = slice(top.start, min(top.stop, len(begins) - before))
                first = _runs(costs.first, before)[:, rows] + costs.ways[:, rows]
                if not first.size or first.min(-1).max() > limit:
                    break
                for behind in range(1, len(begins)):
                    columns = slice(max(low.start, behind), low.stop)
                    second = _runs(costs.second, behind)[
                        :, columns.start - behind : columns.stop - behind
                    ]
                    if not second.size or (first.min(-1) + second.min(-1)).max() > limit:
                        break
                    value = (first[:, :, None] + second[:, None, :]).max(0)
                    step = _Step(before, behind, rows, columns, value <= limit)
                    value = np.where(step.allowed, np.maximum(best[rows, columns], value), np.inf)
                    np.minimum(new[step.behind_it], value, out=new[step.behind_it])
                    mine.append(step)
            new[~begins], new[:, ~begins] = np.inf, np.inf
            best = new
            steps.append(mine)
            if np.isinf(best).all():
                break
        return FoldedSplits(begins, steps, best.diagonal())

    @staticmethod
    def in_rounds(
        limit: float, begins: NDArray[np.bool_], devices: list[DeviceCosts], deadline: float
    ) -> float:
        """Return the slowest device's seconds where they are fewest, of stages in two rounds; 0: too late.

        With the second round's layers in reverse they are a V that turns where that round begins.
        """
        best, size = limit, len(begins) - 1
        for turn in sorted(
            np.flatnonzero(begins)[1:-1].tolist(), key=lambda layer: abs(layer - size / 2)
        ):
            if monotonic() > deadline:
                return 0.0
            order, places = (
                np.r_[:turn, size - 1 : turn - 1 : -1],
                np.r_[:turn, size : turn - 1 : -1],
            )
            turned = [
                replace(own, second=prefix_sums(np.diff(own.second)[:, order])) for own in devices
            ]
            best = min(best, float(FoldedSplits.below(best, begins[places], turned).slowest[turn]))
        return best

    def cheapest(self, seconds: Array, entering: Array) -> tuple[float, list[int]]:
        """Return the least sum of the stages of a split, and its first layers; no split is left: infinite.

        Args:
            seconds: Of every layer on every stage, `(S, L)`.
            entering: Added where a stage but the first begins with layer l + 1, `(S - 1, L - 1)`.
        """
        if np.isinf(self.slowest).all():
            return np.inf, []
        sums = prefix_sums(np.minimum(seconds, LARGE_SECONDS))
        best, taken = np.full((len(self.begins), len(self.begins)), np.inf), list[Index]()
        best[0, -1], stages = 0.0, len(seconds)
        for device, steps in enumerate(self.steps):
            new, which = np.full_like(best, np.inf), np.zeros(best.shape, dtype=np.int64)
            ways = np.zeros((2, len(self.begins)))
            for way, stage in zip(ways, (device, stages - 1 - device), strict=True):
                way[1:-1] = entering[stage - 1] if stage else 0.0
            for number, step in enumerate(steps):
                first = _runs(sums[device], step.before)[step.rows] + ways[0][step.rows]
                places = slice(step.columns.start - step.behind, step.columns.stop - step.behind)
                second = _runs(sums[stages - 1 - device], step.behind)[places] + ways[1][places]
                value = best[step.rows, step.columns] + first[:, None] + second
                better = step.allowed & (value < new[step.behind_it])
                new[step.behind_it][better] = value[better]
                which[step.behind_it][better] = number
            new[~self.begins], new[:, ~self.begins] = np.inf, np.inf
            best = new
            taken.append(which)
        least = best.diagonal()
        row = column = int(least.argmin())
        starts = [0] * stages
        for device in reversed(range(len(self.steps))):
            step = self.steps[device][taken[device][row, column]]
            starts[stages - 1 - device] = column
            row, column = row - step.before, column + step.behind
            starts[device] = row
        return float(least.min()), starts


LARGE_SECONDS = 1e12
"""Seconds of a layer that no strategy can run on a stage."""


def _runs(sums: Array, length: int) -> Array:
    """Return sums over as many layers from each one on, `(..., L + 1 - length)`."""
    return np.asarray(sums[..., length:] - sums[..., :-length])


def _span(some: NDArray[np.bool_]) -> slice:
    """Return a slice from the first to the last that is true."""
    found = np.flatnonzero(some)
    return slice(int(found[0]), int(found[-1]) + 1)


Weights = tuple[Array, Array]
"""How often a path takes the passes and the synchronisation, `(4, S)`, and the messages, `(S - 1,)`."""


@dataclass(frozen=True)
class PathCounts:
    """Counts of passes and messages on a plan's paths."""

    seconds: Array
    """Passes of every stage, rows as in `Chain.rows`, `(4, S)`."""
    message: Array
    """At least, `(S - 1,)`."""
    lacking: Array
    """Bytes of every device above its capacity, as a share of it, `(pp,)`."""


@dataclass(frozen=True)
class Chain:
    """One outer choice with the layers' costs by stage; S stages, L layers, C strategies."""

    table: CostTable
    outer: int
    rows: Array
    """Seconds of forward, backward, weights' gradient and synchronisation, infinite where illegal,
    `(4, Q, L, C)`."""
    segments: StageSegments
    """Layers that a stage can hold by the memory that they need at least, N."""
    message: Array
    """Least seconds of a message one way, `(S - 1, L - 1)`."""
    per_iteration: float
    need: Array
    """Bytes of a layer that add up over a device, `(S, L, C)`."""
    capacity: Array
    """Bytes of every device, `(pp,)`."""

    @staticmethod
    def read(table: CostTable, outer: int) -> "Chain":
        """Return the costs of outer choice `outer`."""
        legal = table.allowed[outer].expand(table.forward.shape[1], -1)
        legal = legal if table.kind_allowed is None else legal & table.kind_allowed
        rows = torch.stack(
            [
                values[outer].detach()
                for values in (table.forward, table.backward, table.weight_gradient, table.sync)
            ]
        ).masked_fill(~legal[:, None, :], torch.inf)
        paid = table.per_iteration[outer].detach().masked_fill(~table.allowed[outer], torch.inf)
        across = table.p2p[outer].detach().amin((-1, -2))[table.boundary_kind] / 2
        need = table.static[outer] + table.in_flight[outer].view(-1, 1, 1) * table.activation[outer]
        return Chain(
            table,
            outer,
            rows.numpy(),
            _room(table, outer),
            across.numpy(),
            float(paid.amin(-1).sum()),
            need.detach().numpy(),
            table.capacity.detach().numpy(),
        )

    def cheapest(
        self, weights: Weights, prices: Array, splits: "FoldedSplits | None" = None
    ) -> tuple[float, HardPlans, PathCounts | None]:
        """Return the least weighted sum of any plan, the plan, and its parts; infinity where none fits.

        Args:
            weights: Of a path.
            prices: Seconds for the whole capacity of every device, `(pp,)`: Lagrange multipliers.
            splits: Those that are looked at; None: all.
        """
        passes, messages = weights
        kinds, devices = self.table.stage_kind.numpy(), self.table.stage_device.numpy()
        # a weight of 0 does not make an illegal strategy legal
        priced = np.where(np.isinf(self.rows[0]), np.inf, 0.0)[kinds]
        finite = np.where(np.isinf(self.rows), 0.0, self.rows)[:, kinds]
        priced = priced + np.einsum("rs,rslc->slc", passes, finite)
        priced = priced + (prices / self.capacity)[devices, None, None] * self.need
        choice = priced.argmin(-1)
        least, entering = priced.min(-1), messages[:, None] * self.message
        if splits is None:
            seconds = self.segments.sums(least, np.arange(len(least)))
            seconds = seconds + self.segments.entering(entering, np.arange(len(messages)))
            value, starts = self.segments.split_below(seconds, np.inf)
        else:
            value, starts = splits.cheapest(least, entering)
        if not np.isfinite(value):
            return np.inf, HardPlans(*(torch.zeros(0, 1, dtype=torch.long) for _ in range(3))), None
        layers = np.arange(priced.shape[1])
        stage = np.searchsorted(starts, layers, side="right") - 1
        chosen = choice[stage, layers]
        held = np.bincount(
            devices[stage], self.need[stage, layers, chosen], minlength=len(self.capacity)
        )
        taken = finite[:, stage, layers, chosen]
        point = PathCounts(
            np.stack([np.bincount(stage, row, minlength=len(kinds)) for row in taken]),
            self.message[np.arange(len(kinds) - 1), np.asarray(starts[1:], dtype=np.int64) - 1],
            held / self.capacity - 1.0,
        )
        plans = HardPlans(
            torch.tensor([self.outer]), torch.as_tensor(chosen)[None], torch.tensor([starts])
        )
        return value + self.per_iteration - float(prices.sum()), plans, point

    def devices_paths(self) -> list[Weights]:
        """Return each device's path to its first pass, its passes and synchronisation, or the path back."""
        table, count = self.table, float(self.table.num_micro_batches[self.outer])
        model, stages = table.pipeline, table.num_stages
        split = find(model.schedule).split
        behind = weights_behind(model.schedule, table.pp, int(count)) if split else np.zeros(stages)
        found = []
        for device in range(table.pp):
            own = table.stage_device.numpy() == device
            before = np.arange(stages) < device
            for back in (False, True) if device else (False,):
                passes = np.zeros((4, stages))
                passes[:2] = count * own + before * np.array([[1], [back]])
                passes[2] = -(behind * own + before) * (back and split)
                passes[3] = table.stage_device.numpy() == 0 if back else own
                ways = passes[:2].sum(0)[1:] if model.blocking else (1.0 + back) * before[:-1]
                found.append((passes, np.asarray(ways)))
        return found

    def path(self, plans: HardPlans) -> Weights:
        """Return how often a critical path of one plan takes every stage's passes, and the messages."""
        cost, model = evaluate_batch(self.table, plans), self.table.pipeline
        count = self.table.num_micro_batches[plans.outer]
        passes = pass_seconds(self.table, plans)
        found = Criticalities.of(passes, cost.sync_seconds, count, self.table.pp, model, whole=True)
        sync = found.sync[:, self.table.stage_device]
        rows = torch.stack([found.forward, found.backward, found.weight_gradient, sync])[:, 0]
        return rows.numpy(), found.message[0].numpy()


def _room(table: CostTable, outer: int) -> StageSegments:
    """Return segments that may fit on their stage."""
    held = table.in_flight[outer].view(-1, 1, 1)
    need = (table.static[outer] + held * table.activation[outer]).detach()
    least = need.masked_fill(~table.allowed[outer], torch.inf).amin(-1).numpy()
    limit = table.capacity.detach().numpy()[table.stage_device.numpy()] * (
        1 + SOLVER_MEMORY_TOLERANCE
    )
    segments = StageSegments.legal(table.num_stages, table.fused_to_previous.numpy())
    return segments.keep(segments.sums(least, np.arange(len(least))) <= limit[segments.stage])


@lru_cache(maxsize=64)
def weights_behind(schedule: str, pp: int, count: int) -> Array:
    """Return passes of weights of every stage behind the last backward pass of its device, `(S,)`."""
    chunks = find(schedule).chunks or 1
    found = np.zeros(chunks * pp)
    # more micro-batches repeat the steady part: a few show how the pipeline drains
    for order in find(schedule).orders(pp, min(count, 3 * pp), chunks):
        last = max(place for place, entry in enumerate(order) if entry.kind == "B")
        for entry in order[last:]:
            found[entry.stage] += entry.kind == "W"
    return found
