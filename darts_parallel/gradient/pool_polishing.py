"""Polishing the plans of a search: by moves, and by the exact solver's segment programs for counted work.

The descent chooses pipeline degree and number of micro-batches, and how the layers differ; inside an outer
choice the label-setting programs of the exact planner often end in a fraction of a second, where moves of
single layers and stages take many rounds. Where they would not end, they stop after a number of labels,
never after a time, so that equal seeds keep giving equal plans.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from darts_parallel.config import SearchConfig
from darts_parallel.cost import CostTable, PricedPlan
from darts_parallel.exact import (
    AGREEMENT,
    FIRST_MARGIN,
    Check,
    DeadlineError,
    OuterChoiceSolver,
    SegmentBounds,
    growth,
    outer_bound,
)
from darts_parallel.gradient.polishing import plan_key, polish
from darts_parallel.gradient.pool import PlanPool, TablePlans
from darts_parallel.gradient.screening import MoveEvaluator

FIRST_WORK = 2**26
"""Largest `MoveEvaluator.work_done` on each plan that is polished before the descent: about 0.7 s."""
POLISH_STARTS = 16
"""Best distinct rounded plans that are polished by cheap moves."""
FINALISTS = 3
"""Best of those whose pipeline configurations the segment programs solve."""
STARTS = 2
"""Outer choices whose best known plans are polished before the descent."""
ALTERNATIVES = 5
"""Outer choices beside the best one whose plans are polished although they cannot win: reports show them."""


class Work:
    """Count labels that may still be made; asked like a deadline.

    Attributes:
        left: Labels left; below 0 the work is over.
        late: Whether the time is over, too.
    """

    def __init__(self, labels: int, late: Callable[[], bool]) -> None:
        self.left, self.late = labels, late

    def __call__(self, labels: int = 0) -> None:
        """Count labels.

        Errors:
            DeadlineError: there were more than allowed, or the time is over.
        """
        self.left -= labels
        if self.left < 0 or self.late():
            raise DeadlineError


def solve_outer(
    case: OuterChoiceSolver, space_kind: str, incumbent: float, check: Check
) -> tuple[PricedPlan | None, bool]:
    """Return the best plan of one outer choice that costs at most `incumbent` under rising limits.

    Args:
        case: Outer choice of a table that is priced by the closed form, not interleaved.
        space_kind: `stagewise` or `layerwise`.
        check: Called often; raises `DeadlineError` to end.

    Returns:
        The plan, or None; and whether that is proven before the end.
    """
    lowest, margin, limit = case.bound, FIRST_MARGIN, incumbent * (1 + AGREEMENT)
    try:
        while case.bound <= limit:
            check()
            before = case.labels
            found = case.attempt(space_kind, min(lowest * (1 + margin), limit), check)
            if found is not None:
                return found, True
            margin *= growth(case.labels - before)
    except DeadlineError:
        return None, False
    return None, True


def at_cut(bounds: SegmentBounds, starts: Sequence[int]) -> SegmentBounds:
    """Return the segments that are stages of one cut of the layers, given by the stages' first layers."""
    stages, ends = bounds.stages, [*starts[1:], bounds.stages.num_layers]
    first, end = np.array(starts)[stages.stage], np.array(ends)[stages.stage]
    return bounds.keep((stages.first == first) & (stages.end == end))


def polish_pool(
    pool: PlanPool,
    space_kind: str,
    config: SearchConfig,
    *,
    hurry: bool,
    bounds: Sequence[Tensor] = (),
) -> str | None:
    """Polish the best plans by moves, then the best of those by programs; the best one first in a hurry.

    Those are the exact solver's segment programs within `polish_labels`. With as many labels together they
    then look at the outer choices that are still open: those whose lower bound is below the best plan.

    Args:
        pool: Plans that the descent met.
        bounds: Lower bounds of the outer choices of every table, each `(O,)`.

    Returns:
        What cut it short, `user` or `time_limit`; None where nothing did.
    """
    polisher = _PoolPolisher(pool, space_kind, config, bounds)
    try:
        polisher.by_moves(hurry=hurry)
        polisher.by_programs()
    except KeyboardInterrupt:
        return "user"
    return "time_limit" if polisher.late else None


def polish_starts(pool: PlanPool, space_kind: str, config: SearchConfig) -> None:
    """Descend from the best known plans by cheap moves, before relaxed plans are simulated step by step.

    Where the best one is that of a simulated pipeline: a descent of relaxed plans takes longer to pass it.

    Args:
        pool: The plans that a search begins with; better ones are added.
    """
    polisher = _PoolPolisher(pool, space_kind, config, ())
    for entry in pool.by_outer()[:STARTS]:
        table = pool.tables[entry.table]
        if table.pipeline.simulated:
            polisher.improve(entry, max_work=FIRST_WORK)


@dataclass
class _PoolPolisher:
    """Polish the plans of a pool; arguments as of `polish_pool`."""

    pool: PlanPool
    space_kind: str
    config: SearchConfig
    bounds: Sequence[Tensor]
    late: bool = False
    """Whether the search's time is over."""
    settled: set[tuple[int, int]] = field(default_factory=set)
    """Table and outer choice of what the programs have solved or excluded."""
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
            if self._can_win(entry) or any(entry is other for other in alternatives):
                self.improve(entry)

    def _is_local_optimum(self, entry: PricedPlan) -> bool:
        """Return whether no cheap move makes a plan better."""
        return plan_key(entry.plan) in self.pool.local_optima[entry.table]

    def _can_win(self, entry: PricedPlan) -> bool:
        """Return whether the lower bound of a plan's outer choice is below the best plan."""
        number, outer = entry.outer
        return not self.bounds or float(self.bounds[number][outer]) <= self.pool.best_time

    def by_programs(self) -> None:
        """Solve the finalists' outer choices, then those that are still open."""
        work = Work(self.config.polish_labels, self.stop)
        for place, entry in enumerate(self.pool.top(FINALISTS)):
            if self.stop():
                return
            number, outer = entry.outer
            bound = float(self.bounds[number][outer]) if self.bounds else None
            if not self._solved(number, outer, work, bound) and place == 0:
                with suppress(DeadlineError):
                    self._solve_cut(entry)
                self.improve(entry)
        work = Work(self.config.polish_labels, self.stop)
        rows = (
            (b, n, outer)
            for n, own in enumerate(self.bounds)
            for outer, b in enumerate(own.tolist())
        )
        for bound, number, outer in sorted(rows):
            if bound >= self.pool.best_time or self.stop():
                break
            self._solved(number, outer, work, bound)

    def improve(self, entry: PricedPlan, max_work: float = float("inf")) -> None:
        """Descend from a plan by moves."""
        table = self.pool.tables[entry.table]
        if self._is_local_optimum(entry):
            return
        # what an evaluator of simulated plans remembers may change its next move
        alike = not table.pipeline.simulated
        evaluator = MoveEvaluator(table, self.stop, max_work)
        plan, _, evaluated = polish(
            table,
            entry.plan,
            self.space_kind,
            evaluator=evaluator,
            visited=self.visited[entry.table] if alike else None,
        )
        self.pool.evaluated += evaluated
        if table.pipeline.simulated and not evaluator.out_of_budget():
            self.pool.local_optima[entry.table].add(plan_key(plan))
        self.pool.add(TablePlans(entry.table, plan))

    def _solve_cut(self, entry: PricedPlan) -> None:
        """Solve the stages of a plan together, as they are cut, where their outer choice takes too long."""
        (number, outer), table = entry.outer, self.pool.tables[entry.table]
        if self._has_program(table) and self.config.polish_labels:
            case = OuterChoiceSolver(
                table, number, outer, outer_bound(table, outer, self.space_kind)
            )
            bounds = SegmentBounds.build(case.costs, self.space_kind)
            case.segments = at_cut(bounds, entry.plan.first_layers[0].tolist())
            work = Work(self.config.polish_labels, self.stop)
            found, _ = solve_outer(case, self.space_kind, self.pool.best_time, work)
            self.pool.evaluated += case.labels
            if found is not None:
                self.pool.add(TablePlans(number, found.plan))

    def _has_program(self, table: CostTable) -> bool:
        """Return whether the segment programs know the table's plans."""
        return (
            table.has_plain_stages and not table.pipeline.simulated and self.space_kind != "uniform"
        )

    def _solved(self, number: int, outer: int, work: Work, bound: float | None) -> bool:
        """Return whether the segment programs found or excluded a better plan of the outer choice."""
        table, before = self.pool.tables[number], max(work.left, 0)
        if not self._has_program(table) or not before:
            return False
        if (number, outer) not in self.settled:
            best = self.pool.best_time
            known = outer_bound(table, outer, self.space_kind) if bound is None else bound
            case = OuterChoiceSolver(table, number, outer, known)
            found, proven = solve_outer(case, self.space_kind, best, work)
            self.pool.evaluated += before - max(work.left, 0)
            if found is not None:
                self.pool.add(TablePlans(number, found.plan))
            if not proven:
                return False
            self.settled.add((number, outer))
        return True
