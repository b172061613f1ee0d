"""Polish the plans of a search: by moves, and by the exact solver's programs.

The descent chooses pipeline degree and number of micro-batches, and how the layers differ. Inside a
pipeline configuration the label-setting programs of the exact planner often end in a fraction of a
second, where moves of single layers and stages take many rounds. In a uniform space the best stages
of every strategy are enumerated. Programs that would not end stop
after a number of labels, not after a time, so that equal seeds keep giving equal plans.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from darts_parallel.config import SearchConfig
from darts_parallel.cost import COST_TOLERANCE, CostTable, PricedPlan
from darts_parallel.exact import (
    DeadlineError,
    OuterChoiceSolver,
    find_uniform_plan,
)
from darts_parallel.gradient.polishing import plan_key, polish
from darts_parallel.gradient.pool import PlanPool
from darts_parallel.gradient.screening import MoveEvaluator

POLISH_STARTS = 16
"""Best distinct rounded plans that are polished by cheap moves."""
FINALISTS = 3
"""Best of those whose pipeline configurations the segment programs solve."""
ALTERNATIVES = 5
"""Next best configurations whose plans are polished although they cannot win: reports show them."""


@dataclass
class Work:
    """Label budget with the interface of a deadline."""

    left: int
    """Labels left; below 0 the work is over."""
    late: Callable[[], bool]
    """Whether the time is over, too."""

    def __call__(self, labels: int = 0) -> None:
        """Count labels.

        Errors:
            DeadlineError: there were more than allowed, or the time is over.
        """
        self.left -= labels
        if self.left < 0 or self.late():
            raise DeadlineError


def polish_pool(
    pool: PlanPool,
    space_kind: str,
    config: SearchConfig,
    *,
    hurry: bool,
    bounds: Sequence[Tensor],
) -> str | None:
    """Polish the best plans by moves, then the best of those by segment programs.

    The programs have `polish_labels`.

    Args:
        pool: Plans that the descent met.
        hurry: Polish the best plan first.
        bounds: Lower bounds of the configurations of every table, each `(O,)`.

    Returns:
        `user` or `time_limit` where that cut it short, else None.
    """
    polisher = _PoolPolisher(pool, space_kind, config, bounds)
    try:
        polisher.by_moves(hurry=hurry)
        polisher.by_programs()
    except KeyboardInterrupt:
        return "user"
    return "time_limit" if polisher.late else None


@dataclass
class _PoolPolisher:
    """Polish the plans of a pool; arguments as of `polish_pool`."""

    pool: PlanPool
    space_kind: str
    config: SearchConfig
    bounds: Sequence[Tensor]
    late: bool = False
    """Whether the search's time is over."""
    visited: dict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """Plans of every table that quick descents came through."""

    def stop(self) -> bool:
        """Return whether to end; asked often."""
        self.late = self.late or self.pool.clock.seconds > self.config.max_seconds
        return self.late

    def by_moves(self, *, hurry: bool) -> None:
        """Descend from the best plans by moves, in a hurry first from the best one."""
        for entry in self.pool.top(1 if hurry else 0):
            self.improve(entry)
        alternatives = self.pool.by_outer()[: ALTERNATIVES + 1]
        for entry in self.pool.top(POLISH_STARTS):
            shown = any(entry is other for other in alternatives)
            if shown or self._bound(entry) <= self.pool.best_time:
                self.improve(entry)

    def _bound(self, entry: PricedPlan) -> float:
        """Return the lower bound of a plan's configuration."""
        number, outer = entry.outer
        return float(self.bounds[number][outer])

    def by_programs(self) -> None:
        """Solve the finalists' configurations while labels are left; in a uniform space, the best ones."""
        if self.space_kind == "uniform":
            self._enumerate()
            return
        work = Work(self.config.polish_labels, self.stop)
        solved = set()
        for entry in self.pool.top(FINALISTS):
            if self.stop():
                return
            if entry.outer not in solved and self._solved(entry, work):
                solved.add(entry.outer)

    def _enumerate(self) -> None:
        """Find the best stages of every strategy, in the best pipeline configurations."""
        for entry in self.pool.by_outer()[:POLISH_STARTS]:
            table = self.pool.tables[entry.table]
            if table.simulated or self._bound(entry) > self.pool.best_time:
                continue
            left = self.config.max_seconds - self.pool.clock.seconds
            outer = table.select([entry.outer[1]])
            found = find_uniform_plan([outer], self.pool.best_time, time.monotonic() + left).best
            if found is not None:
                plan = replace(found.plan, outer=entry.plan.outer)
                self.pool.add(entry.table, plan)

    def improve(self, entry: PricedPlan) -> None:
        """Descend from a plan by moves."""
        table = self.pool.tables[entry.table]
        if plan_key(entry.plan) in self.pool.local_optima[entry.table]:
            return
        # what an evaluator of simulated plans remembers may change its next move
        visited = set() if table.simulated else self.visited[entry.table]
        evaluator = MoveEvaluator(table, self.stop, visited)
        runs = not self._has_program(table)
        polished = polish(table, entry.plan, self.space_kind, evaluator=evaluator, runs=runs)
        self.pool.evaluated += polished.evaluated
        if table.simulated and not evaluator.stop():
            self.pool.local_optima[entry.table].add(plan_key(polished.plan))
        self.pool.add(entry.table, polished.plan)

    def _has_program(self, table: CostTable) -> bool:
        """Return whether the segment programs know the table's plans: then moves change no single layers.

        Moves of layers took as long, and led to the same plans on 19 of 19 problems.
        """
        closed_form = table.has_plain_stages and not table.simulated
        closed_form = closed_form and table.own is None
        return closed_form and self.space_kind != "uniform"

    def _solved(self, entry: PricedPlan, work: Work) -> bool:
        """Return whether the segment programs found or excluded a better plan of a configuration."""
        number, outer = entry.outer
        table = self.pool.tables[number]
        if not self._has_program(table) or work.left <= 0:
            return False
        case = OuterChoiceSolver(table, number, outer, self._bound(entry))
        limit = self.pool.best_time * (1 + COST_TOLERANCE)
        before = work.left
        try:
            found = case.solve(self.space_kind, limit, work)
        except DeadlineError:
            return False
        finally:
            self.pool.evaluated += before - max(work.left, 0)
        if found is not None:
            self.pool.add(number, found.plan)
        return True
