"""Moves of a simulated pipeline, priced in the order of what critical paths promise of them.

A path through the schedule is never longer than the longest one, so the seconds along known critical paths
bound a changed plan from below: a move that leaves some path as long as it is cannot help, and is not
simulated. The others are simulated in batches, most promising first, until one helps; every batch without
gain gives a path more. When none is left the whole neighbourhood has been asked.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from darts_parallel.cost import (
    CostTable,
    Criticalities,
    HardPlans,
    PassSeconds,
    TableReading,
    evaluate_batch,
    pass_seconds,
    simulated_seconds,
    table_reading,
)
from darts_parallel.schedules import find

LAYER_PASSES = 12
"""Simulated passes that take as long as reading what one layer of a plan costs: 130 ns against 10 ns."""
FIRST_BATCH = 32
"""Plans that are simulated at first; each further batch is twice as large."""
MOST_PATHS = 12
"""Paths that are remembered of an outer choice."""

LOOSE = 1e-9
"""Relative; sums of seconds in another order differ by less."""


def work_seconds(table: CostTable, plans: HardPlans, reading: TableReading) -> Tensor:
    """Bound the seconds of B plans under any schedule, `(B,)`: a device computes all micro-batches."""
    counts = table.num_micro_batches[plans.outer].unsqueeze(1)
    work = counts * table.by_device(reading.stage_seconds) + reading.sync
    return (work.amax(1) + reading.per_iteration) * (1.0 - LOOSE)


def num_passes(table: CostTable) -> Tensor:
    """Count the passes of a plan of each outer choice of a simulated table, `(O,)`."""
    kinds = 3 if find(table.pipeline.schedule).split else 2
    return kinds * table.num_stages * table.num_micro_batches


@dataclass
class MoveEvaluator:
    """Price hard plans of one table against the best known."""

    table: CostTable
    stop: Callable[[], bool] = lambda: False
    """Asked after every batch; true leaves the rest of a neighbourhood unasked."""
    max_work: float = float("inf")
    """Work after which no more plans are looked at."""
    work_done: int = field(default=0, init=False)
    """Passes that were simulated, and layers that were read in simulated tables as `LAYER_PASSES` each."""
    simulated: int = field(default=0, init=False)
    """Plans whose true cost was worked out."""
    paths: dict[int, list[Criticalities]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    """Critical paths by outer choice, newest last."""

    def out_of_budget(self) -> bool:
        """Return whether to look at no more plans."""
        return self.work_done >= self.max_work or self.stop()

    def seconds(self, plans: HardPlans, best: float) -> Tensor:
        """Price plans that are faster than `best`: seconds per iteration, shape `(B,)`.

        Infinite: infeasible, not faster, or, where a more promising one is, not looked at.

        Args:
            plans: B plans.
            best: Seconds of the plan that they change.
        """
        result = torch.full((len(plans),), torch.inf, dtype=torch.float64)
        if not self.table.pipeline.simulated:
            cost = evaluate_batch(self.table, plans)
            self.simulated += len(plans)
            return cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        reading = table_reading(self.table, plans)
        # where there are few passes, reading thousands of moves takes longer than simulating the best
        self.work_done += LAYER_PASSES * plans.choices.numel()
        feasible = torch.nonzero(reading.feasible).squeeze(1)
        priced = _Priced.of(self.table, plans[feasible], reading, feasible)
        left, size, bound = torch.arange(len(feasible)), FIRST_BATCH, self._bounds(priced)
        while len(left):
            order = torch.argsort(bound, stable=True)
            order = order[bound[order] < best]
            batch, rest = left[order[:size]], order[size:]
            if not len(batch):
                break
            some = priced[batch]
            times = some.simulated(self.table)
            self.simulated += len(batch)
            self.work_done += int(num_passes(self.table)[some.outer].sum())
            result[feasible[batch]] = torch.where(times < best, times, torch.inf)
            self._remember(some[times.argmin().unsqueeze(0)])
            if bool((times < best).any()) or self.out_of_budget():
                break
            left, size = left[rest], 2 * size
            bound = torch.maximum(bound[rest], self._bounds(priced[left], newest=True))
        return result

    def _remember(self, plan: "_Priced") -> None:
        """Keep a critical path of one plan."""
        table, outer = self.table, int(plan.outer[0])
        count = table.num_micro_batches[plan.outer]
        path = Criticalities.of(plan.passes, plan.sync, count, table.pp, table.pipeline, whole=True)
        self.paths[outer] = [*self.paths[outer][1 - MOST_PATHS :], path]

    def _bounds(self, plans: "_Priced", *, newest: bool = False) -> Tensor:
        """Bound the seconds of plans, `(B,)`, by all paths of their outer choices or the newest."""
        result = torch.zeros(len(plans.outer), dtype=torch.float64)
        for outer, paths in self.paths.items():
            mine = torch.nonzero(plans.outer == outer).squeeze(1)
            own = plans[mine]
            for path in paths[-1:] if newest else paths:
                length = path.seconds(own.passes, own.sync) + own.per_iteration
                result[mine] = torch.maximum(result[mine], length)
        return result


@dataclass(frozen=True)
class _Priced:
    """Hold what a simulation and a path ask of B plans."""

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

    def __getitem__(self, rows: Tensor) -> "_Priced":
        return _Priced(
            self.outer[rows], self.passes[rows], self.sync[rows], self.per_iteration[rows]
        )

    def simulated(self, table: CostTable) -> Tensor:
        """Return seconds per iteration, `(B,)`."""
        counts = table.num_micro_batches[self.outer]
        total, _ = simulated_seconds(self.passes, self.sync, counts, table.pp, table.pipeline)
        return total + self.per_iteration
