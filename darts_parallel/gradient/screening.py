"""Moves of a simulated pipeline, priced in the order of what critical paths promise of them.

A path through the schedule is never longer than the longest one. So the seconds along known critical
paths bound a changed plan from below: a move that leaves some path as long as it is cannot help, and
is not simulated. The other moves are simulated in batches, most promising first, until one helps.
Every batch without gain adds a path. When no move is left the whole neighbourhood has been tried.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.cost import (
    COST_TOLERANCE,
    CostTable,
    Criticalities,
    HardPlans,
    PassSeconds,
    Rows,
    TableReading,
    evaluate_batch,
    filled,
    flatnonzero,
    pass_seconds,
    simulated_seconds,
    table_reading,
)

SLICE = 2**18
"""Layers of plans that are priced at once: 2 MB a tensor, of which offloading needs some sixty."""
FIRST_BATCH = 32
"""Plans that are simulated at first; each further batch is twice as large."""
MAX_PATHS = 12
"""Paths that are remembered of a pipeline configuration."""


def work_seconds(table: CostTable, plans: HardPlans, reading: TableReading) -> Tensor:
    """Bound the seconds of B plans under any schedule, `(B,)`: each device computes all batches."""
    counts = table.num_micro_batches[plans.outer].unsqueeze(1)
    busy = counts * table.by_device(reading.stage_seconds)
    work = busy + reading.sync
    # sums of seconds in another order differ by less
    seconds = work.amax(1) + reading.per_iteration
    return seconds * (1.0 - COST_TOLERANCE)


def num_passes(table: CostTable) -> Tensor:
    """Count the passes of a plan of each row of a simulated table, `(O,)`."""
    kinds = 3 if table.rule.split else 2
    return kinds * table.num_stages * table.num_micro_batches


@dataclass
class MoveEvaluator:
    """Price hard plans of one table against the best known."""

    table: CostTable
    stop: Callable[[], bool] = lambda: False
    """Asked after every batch; true leaves the rest of a neighbourhood unpriced."""
    visited: set[bytes] = field(default_factory=set)
    """Keys of plans of equal descents of this table, to which a descent adds its own.

    Where it meets one of them it ends, because it would go on as the other one did.
    """
    simulated: int = field(default=0, init=False)
    """Plans whose true cost was computed."""
    paths: dict[int, list[Criticalities]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """Critical paths by pipeline configuration, newest last."""

    def seconds(self, plans: HardPlans, best: float) -> Tensor:
        """Price plans that are faster than `best`: seconds per iteration, shape `(B,)`.

        Infinite: infeasible, not faster, or not priced because a more promising plan is faster.

        Args:
            plans: B plans.
            best: Seconds of the plan that they change.
        """
        result = filled(torch.inf, len(plans))
        size = max(SLICE // self.table.num_layers, 1)
        for rows in torch.split(torch.arange(len(plans)), size):
            if self.stop():
                break
            some = plans[rows]
            if self.table.simulated:
                result[rows] = self._simulated_seconds(some, best)
                if bool((result[rows] < best).any()):
                    break
            else:
                cost = evaluate_batch(self.table, some)
                self.simulated += len(some)
                result[rows] = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        return result

    def _simulated_seconds(self, plans: HardPlans, best: float) -> Tensor:
        result = filled(torch.inf, len(plans))
        reading = table_reading(self.table, plans)
        feasible = flatnonzero(reading.feasible)
        priced = _Priced.of(self.table, plans[feasible], reading, feasible)
        left = torch.arange(len(feasible))
        size = FIRST_BATCH
        bound = self._bounds(priced)
        while len(left):
            order = torch.argsort(bound, stable=True)
            order = order[bound[order] < best]
            batch = left[order[:size]]
            rest = order[size:]
            if not len(batch):
                break
            times = self._simulate(priced[batch])
            faster = times < best
            result[feasible[batch]] = torch.where(faster, times, torch.inf)
            if bool(faster.any()) or self.stop():
                break
            left = left[rest]
            size = 2 * size
            newest = self._bounds(priced[left], newest=True)
            bound = torch.maximum(bound[rest], newest)
        return result

    def _simulate(self, plans: "_Priced") -> Tensor:
        """Return the seconds of plans, `(B,)`; remember a critical path of the fastest."""
        table = self.table
        counts = table.num_micro_batches[plans.outer]
        total, _ = simulated_seconds(plans.passes, plans.sync, counts, table.pipeline)
        times = total + plans.per_iteration
        self.simulated += len(times)
        row = times.argmin().unsqueeze(0)
        best = plans[row]
        path = Criticalities.of(best.passes, best.sync, counts[row], table.pipeline)
        outer = int(best.outer[0])
        newest = self.paths[outer][1 - MAX_PATHS :]
        self.paths[outer] = [*newest, path]
        return times

    def _bounds(self, plans: "_Priced", *, newest: bool = False) -> Tensor:
        """Bound the seconds of plans, `(B,)`, by all paths of their configurations or the newest."""
        result = filled(0.0, len(plans))
        for outer, paths in self.paths.items():
            rows = flatnonzero(plans.outer == outer)
            some = plans[rows]
            for path in paths[-1:] if newest else paths:
                length = path.seconds(some.passes, some.sync)
                length = length + some.per_iteration
                result[rows] = torch.maximum(result[rows], length)
        return result


@dataclass(frozen=True)
class _Priced(Rows):
    """Passes and other seconds of B plans, which a simulation and a path read."""

    outer: Tensor
    passes: PassSeconds
    sync: Tensor
    per_iteration: Tensor

    @staticmethod
    def of(table: CostTable, plans: HardPlans, reading: TableReading, rows: Tensor) -> "_Priced":
        """Price plans, which are the `rows` of a reading."""
        inside, across = reading.between
        passes = pass_seconds(table, plans, (inside[rows], across[rows]))
        return _Priced(plans.outer, passes, reading.sync[rows], reading.per_iteration[rows])
