"""Exact planner: dynamic programming over labels, with lower bounds and a rising cost limit.

A limit just above the best lower bound is tried first, on every outer choice whose own bound is below
it; it prunes almost all labels. As long as no plan is found the limit rises, so the search never pays
for a loose incumbent, and after every round the limit itself is a proven lower bound.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from darts_parallel.bounds import MODES, Index, OuterCosts, lower_bound
from darts_parallel.cost import HardPlans, evaluate_batch
from darts_parallel.problem import Problem
from darts_parallel.space import outer_spaces
from darts_parallel.table import CostTable, build_tables
from baselines.budgets import SegmentBounds, Uses
from baselines.partition import Arrangement, Partition
from baselines.result import BaselineResult, Candidate, DeadlineReached, TableResult
from baselines.single_fronts import StagewiseFronts
from baselines.stage_fronts import LayerwiseFronts

FIRST_MARGIN, MARGIN_GROWTH = 0.0003, 3.0
"""The first limit, relative to the lower bound, and its growth from round to round."""
AGREEMENT = 1e-9
"""Relative; an incumbent is reached again, and found plans are verified, to this."""


def find_plan(
    problem: Problem, *, budget: float | None = None, seed: int = 0, incumbent: float = float("inf")
) -> BaselineResult:
    """The optimal plan of the problem's space, in the model.

    Args:
        budget: Seconds of wall-clock; None: as long as it takes.
        seed: Ignored, nothing is random.
        incumbent: Cost of a known plan, seconds; speeds up the proof.
    """
    begin = time.monotonic()
    tables = build_tables(problem, outer_spaces(problem))
    deadline = None if budget is None else begin + budget
    result = solve(tables, problem.config.space.kind, incumbent, deadline)
    note = "optimal in the model" if result.proven else "stopped by its time limit; lower bound only"
    return result.to_baseline(tables, time.monotonic() - begin, note)


def solve(
    tables: Sequence[CostTable],
    mode: str,
    incumbent: float = float("inf"),
    deadline: float | None = None,
    *,
    merge: bool = True,
) -> TableResult:
    """The optimal plan over all tables and outer choices.

    Args:
        tables: One for each pipeline degree.
        mode: One of `MODES`.
        incumbent: Cost of a known plan; plans above it are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
        merge: Share the work on segments of equal layers.

    Returns:
        Proven unless the deadline came first. Without a plan and proven, none costs at most `incumbent`.
    """
    return _Search(tables, mode, incumbent, deadline, merge, limit=incumbent * (1 + AGREEMENT)).run()


@dataclass
class _Case:
    """One outer choice, and for the uniform space one strategy, to be solved or excluded."""

    table_index: int
    outer: int
    costs: OuterCosts
    bound: float
    segments: SegmentBounds | None = None


@dataclass
class _Search:
    """State of one exact search."""

    tables: Sequence[CostTable]
    mode: str
    incumbent: float
    deadline: float | None
    merge: bool
    limit: float = np.inf
    best: Candidate | None = None
    labels: int = 0
    cases: list[_Case] = field(default_factory=list)

    def run(self) -> TableResult:
        """Raise the limit until a plan is found, then exclude the other outer choices."""
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode} must be one of {', '.join(MODES)}.")
        try:
            self.cases = self._open()
            # no plan at all costs more: where none is feasible the limit must stop somewhere
            self.limit = min(self.limit, max((_dearest(case.costs) for case in self.cases), default=0.0))
            margin, lowest = FIRST_MARGIN, min((case.bound for case in self.cases), default=np.inf)
            while (open_ := [case for case in self.cases if case.bound <= self.limit]) and np.isfinite(lowest):
                trial = min(lowest * (1 + margin), self.limit)
                for case in sorted((c for c in open_ if c.bound <= trial), key=lambda c: c.bound):
                    self._attempt(case, min(trial, self.limit))
                margin *= MARGIN_GROWTH
        except DeadlineReached:
            return TableResult(self.best, self._lower_bound(), False, self.labels)
        nothing = self.best is None and self.incumbent == np.inf
        return TableResult(self.best, np.inf if nothing else self._lower_bound(), True, self.labels)

    def _check(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise DeadlineReached

    def _lower_bound(self) -> float:
        if not self.cases:
            return 0.0
        known = min(case.bound for case in self.cases)
        return float(min(known, np.inf if self.best is None else self.best.cost))

    def _open(self) -> list[_Case]:
        """All outer choices with their bounds; those that no plan fits have an infinite one."""
        cases = []
        for t, table in enumerate(self.tables):
            for outer in range(table.num_outer):
                for choices in self._restrictions(table, outer):
                    self._check()
                    costs = OuterCosts.read(table, outer, choices)
                    cases.append(_Case(t, outer, costs, lower_bound(costs, self.mode)))
        return cases

    def _restrictions(self, table: CostTable, outer: int) -> list[Index | None]:
        if self.mode != "uniform":
            return [None]
        return [np.array([c]) for c in np.flatnonzero(table.allowed[outer].numpy())]

    def _attempt(self, case: _Case, limit: float) -> None:
        """Find the best plan of `case` within `limit`, or prove that there is none."""
        if case.bound > limit:
            return
        if case.segments is None:
            case.segments = SegmentBounds.build(case.costs, self.mode)
        uses = Uses.build(case.costs, case.segments, limit)
        source = self._source(case, uses)
        partition = Partition(case.costs, uses, source, self._check)
        plan = partition.solve()
        self.labels += source.labels_made + partition.labels_made
        if plan is None:
            case.bound = float(np.nextafter(limit, np.inf))
            return
        candidate = self._verified(case, plan)
        # solved: no better plan of this outer choice exists
        case.bound = np.inf
        if self.best is None or candidate.cost < self.best.cost:
            self.best, self.limit = candidate, candidate.cost

    def _source(self, case: _Case, uses: Uses) -> LayerwiseFronts | StagewiseFronts:
        check: Callable[[], None] = self._check
        if self.mode == "layerwise":
            return LayerwiseFronts(case.costs, uses, check, self.merge)
        return StagewiseFronts(case.costs, uses, check)

    def _verified(self, case: _Case, plan: Arrangement) -> Candidate:
        """The plan with its true cost, which must agree with the label's."""
        hard = HardPlans(torch.tensor([case.outer]), torch.tensor([plan.choices]), torch.tensor([plan.starts]))
        cost = evaluate_batch(self.tables[case.table_index], hard)
        true = float(cost.iteration_time[0])
        if not bool(cost.feasible[0]) or abs(true - plan.cost) > AGREEMENT * true:
            raise RuntimeError(f"dynamic programming priced a plan at {plan.cost} s, its true cost is {true} s")
        return Candidate(true, case.table_index, hard)


def _dearest(costs: OuterCosts) -> float:
    """Seconds that no plan of the outer choice exceeds."""
    layers = costs.time.max(axis=(0, 2)).sum()
    pairs = np.maximum(costs.reshard.max(axis=(0, 2, 3)), costs.p2p.max(axis=(0, 2, 3))).sum()
    paid_once = costs.sync.max(axis=(0, 2)).sum() + costs.once.max(axis=1).sum()
    return float(costs.num_micro_batches * (layers + pairs) + paid_once)
