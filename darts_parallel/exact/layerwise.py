"""Exact planner: dynamic programming over labels, with lower bounds and a rising cost limit.

The problem of one outer choice (K stages, m micro-batches), as `OuterCosts` holds it:

Variables    s[k]        first layer of stage k, 0 = s[0] < s[1] < ... < s[K] = L
             c[l]        strategy of layer l, one of C
Stage k      t[k]      = sum of time[l, c[l]] and reshard[l, c[l], c[l+1]] inside s[k] <= l < s[k+1], and p2p
                         before s[k]: seconds of a micro-batch      -> `LayerwiseFronts`, `Partition`
             g[k]      = sum of sync[l, c[l]]: seconds after the last micro-batch
             o[k]      = sum of per_iteration[l, c[l]]: seconds that are paid once
Objective    min  sum_k t[k] + (m - 1) max_k t[k] + max_k g[k] + sum_k o[k]     -> `evaluate_batch`
Subject to   memory: sum of static[l, c[l]] + in_flight[k] activation[l, c[l]], and the largest
                         working[l, c[l]], at most capacity[k]      -> `LabelForms`, `StagewiseFronts`
             legality: kind_allowed of the stage's devices          -> `useful_choices`
             fusion: no stage begins at a fused layer               -> `StageSegments`
             space: layerwise: any c; stagewise: c equal inside a stage (`StagewiseFronts`);
                         uniform: c equal everywhere                -> `find_uniform_plan`

Labels       (t, o, g, bytes, working) of the layers so far; one that another equals or beats in all
             is dropped                                             -> `pareto`
Bounds       memory is priced by a multiplier, which separates layers; sum and bottleneck are bounded
             apart, each by a programme over boundaries             -> `SegmentGrid`, `lower_bound`
             a limit on the objective leaves each segment budgets for t, g, o   -> `SegmentBounds`,
                         `UsableSegments`; each label must be completed within them -> `LabelLimits`
Merging      segments of equal layers share labels                  -> `SegmentTrie`

Search       over all outer choices by `OuterChoiceSolver`. A limit just above the best lower bound is tried
             first, on every outer choice whose own bound is below it; it prunes almost all labels. As long
             as no plan is found the limit rises, so the search never pays for a loose incumbent, and after
             every round the limit itself is a proven lower bound   -> `find_layerwise_plan`
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from darts_parallel.config import SPACES
from darts_parallel.cost import CostTable, PricedPlan
from darts_parallel.exact.bounds import outer_bound, outer_lower_bounds, quick_lower_bounds
from darts_parallel.exact.outer_choice import AGREEMENT, OuterChoiceSolver
from darts_parallel.exact.result import OFFLOADING, DeadlineError, TableResult
from darts_parallel.exact.uniform import find_uniform_plan

WITHOUT_INTERLEAVING = (
    "optimal but for interleaved plans that are not uniform, which are bounded only"
)
INTERLEAVED_ONLY = (
    "it knows no interleaved plans, and the space has no others; they are bounded only"
)
FIRST_MARGIN = 0.0003
"""The first limit, relative to the lower bound."""


def find_layerwise_plan(
    tables: Sequence[CostTable],
    space_kind: str,
    incumbent: float = float("inf"),
    deadline: float | None = None,
    *,
    uniform: TableResult | None = None,
) -> TableResult:
    """Return the optimal plan over all tables and outer choices.

    Args:
        space_kind: One of `config.schema.SPACES`.
        incumbent: Cost of a known plan; plans above it are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
        uniform: Answer of `find_uniform_plan` on these tables; None has it asked for here.

    Returns:
        Proven unless the deadline came first. Without a plan and proven, none costs at most `incumbent`.
    """
    if space_kind not in SPACES:
        raise ValueError(f"space_kind={space_kind} must be one of {', '.join(SPACES)}.")
    if any(table.host for table in tables):
        floor = min(float(outer_lower_bounds(table, space_kind).min()) for table in tables)
        return TableResult(None, floor, False, 0, note=OFFLOADING)
    if space_kind == "uniform":
        return find_uniform_plan(tables, incumbent, deadline)
    plain = [number for number, table in enumerate(tables) if table.virtual_stages == 1]
    others = [
        float(outer_lower_bounds(table).min()) for table in tables if table.virtual_stages > 1
    ]
    if tables and not plain:
        return TableResult(None, min(others), False, 0, note=INTERLEAVED_ONLY)
    search = _Search(
        tables, plain, space_kind, incumbent, deadline, incumbent * (1 + AGREEMENT), uniform
    )
    result = search.run()
    if not others:
        return result
    note = WITHOUT_INTERLEAVING if result.proven else ""
    floor = min(result.lower_bound, *others)
    return replace(result, lower_bound=floor, proven=False, note=note)


@dataclass
class _Search:
    """State of one exact search."""

    tables: Sequence[CostTable]
    plain: list[int]
    """Numbers of the tables that are not interleaved."""
    space_kind: str
    incumbent: float
    deadline: float | None
    limit: float
    uniform: TableResult | None
    best: PricedPlan | None = None
    fallback: PricedPlan | None = None
    """The best uniform plan: a ceiling, and the answer where none is better or the deadline comes first."""
    cases: list[OuterChoiceSolver] = field(default_factory=list)

    def run(self) -> TableResult:
        """Open all outer choices, then search them until the proof or the deadline."""
        for number in self.plain:
            table = self.tables[number]
            rows = enumerate(quick_lower_bounds(table).tolist())
            self.cases += [OuterChoiceSolver(table, number, outer, bound) for outer, bound in rows]
        try:
            if self.uniform is None:
                self.uniform = find_uniform_plan(self.tables, self.incumbent, self.deadline)
            self.fallback = self.uniform.best
            self._open()
            self._search()
        except DeadlineError:
            return TableResult(
                self.best or self.fallback, self._lower_bound(), False, self._labels()
            )
        if self.best is None and self.fallback is not None and self.fallback.time <= self.limit:
            self.best = self.fallback
        nothing = self.best is None and self.incumbent == np.inf
        return TableResult(
            self.best, np.inf if nothing else self._lower_bound(), True, self._labels()
        )

    def _open(self) -> None:
        """Bound all outer choices that a quick look leaves open; of those that no plan fits infinitely."""
        known = min(
            self.limit, np.inf if self.fallback is None else self.fallback.time * (1 + AGREEMENT)
        )
        for case in self.cases:
            if case.bound <= known:
                self._check()
                case.bound = outer_bound(case.table, case.outer, self.space_kind) or case.bound

    def _search(self) -> None:
        """Raise the limit until a plan is found, then exclude the other outer choices."""
        if self.fallback is not None:
            self.limit = min(self.limit, self.fallback.time * (1 + AGREEMENT))
        if self.limit == np.inf:
            # no plan at all costs more: where none is feasible the limit must stop somewhere
            self.limit = max((case.most_expensive() for case in self.cases), default=0.0)
        margin, lowest = FIRST_MARGIN, min((case.bound for case in self.cases), default=np.inf)
        while any(case.bound <= self.limit for case in self.cases):
            trial, before = min(lowest * (1 + margin), self.limit), self._labels()
            for case in sorted(self.cases, key=lambda case: case.bound):
                found = case.attempt(self.space_kind, min(trial, self.limit), self._check)
                if found is not None and found.time < (
                    np.inf if self.best is None else self.best.time
                ):
                    self.best, self.limit = found, min(self.limit, found.time)
            margin *= growth(self._labels() - before)

    def _check(self, labels: int = 0) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise DeadlineError

    def _labels(self) -> int:
        return sum(case.labels for case in self.cases)

    def _lower_bound(self) -> float:
        known = min((case.bound for case in self.cases), default=np.inf)
        best = self.best or self.fallback
        return float(min(known, np.inf if best is None else best.time))


def growth(labels: int) -> float:
    """Return the growth of the margin after a round without a plan; less after rounds of many labels."""
    return 3.0 if labels < 20_000 else 1.6 if labels < 800_000 else 1.25
