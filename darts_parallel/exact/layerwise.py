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
             legality: kind_allowed of the stage's devices          -> `LayerwiseFronts`
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

from dataclasses import dataclass, replace
from math import inf

from darts_parallel.cost import COST_TOLERANCE, PricedPlan, Tables
from darts_parallel.exact.bounds import least_bound, outer_bound, quick_lower_bounds
from darts_parallel.exact.outer_choice import (
    OuterChoiceSolver,
    least_open,
    rising_plans,
)
from darts_parallel.exact.result import (
    Check,
    DeadlineError,
    TableResult,
    deadline_check,
    too_large_note,
    unknown_costs,
)
from darts_parallel.exact.segments import too_many_segments
from darts_parallel.exact.uniform import find_uniform_plan

WITHOUT_INTERLEAVING = (
    "optimal but for interleaved plans that are not uniform, which are bounded only"
)
INTERLEAVED_ONLY = (
    "it knows no interleaved plans, and the space has no others; they are bounded only"
)


def find_layerwise_plan(
    tables: Tables,
    space_kind: str,
    incumbent: float = inf,
    deadline: float = inf,
    *,
    uniform: TableResult | None = None,
) -> TableResult:
    """Return the optimal plan over all tables and outer choices.

    Args:
        space_kind: One of `config.schema.SPACES`.
        incumbent: Cost of a known plan; plans above it are not looked for.
        deadline: `time.monotonic()` at which to stop without a proof.
        uniform: Answer of `find_uniform_plan` on these tables; None: it is computed here.

    Returns:
        Proven unless the deadline came first or a part is too large, which the note names. Without a plan
        and proven, none costs at most `incumbent`.
    """
    unknown = unknown_costs(tables)
    if unknown:
        return TableResult(None, least_bound(tables, space_kind), False, 0, note=unknown)
    if space_kind == "uniform":
        return find_uniform_plan(tables, incumbent, deadline)
    interleaved = [table for table in tables if table.virtual_stages > 1]
    floor = least_bound(interleaved, space_kind)
    if tables and len(interleaved) == len(tables):
        return TableResult(None, floor, False, 0, note=INTERLEAVED_ONLY)
    if uniform is None:
        uniform = find_uniform_plan(tables, incumbent, deadline)
    check = deadline_check(deadline)
    search = _LayerwiseSearch(space_kind, incumbent, uniform.best, check, _solvers(tables))
    result = search.run()
    if interleaved:  # these plans need `floor` seconds at least, and are not searched
        note = WITHOUT_INTERLEAVING if result.proven else result.note
        lower_bound = min(result.lower_bound, floor)
        result = replace(result, lower_bound=lower_bound, proven=False, note=note)
    return result


def _solvers(tables: Tables) -> list[OuterChoiceSolver]:
    """Return a solver for every outer choice of the tables that are not interleaved."""
    found = []
    for number, table in enumerate(tables):
        if table.virtual_stages == 1:
            bounds = quick_lower_bounds(table).tolist()
            for outer, bound in enumerate(bounds):
                found.append(OuterChoiceSolver(table, number, outer, bound))
    return found


@dataclass
class _LayerwiseSearch:
    """State of one exact search."""

    space_kind: str
    incumbent: float
    uniform: PricedPlan | None
    """The best uniform plan: its cost is a limit. It is the answer where no better plan is found."""
    check: Check
    solvers: list[OuterChoiceSolver]
    best: PricedPlan | None = None

    def __post_init__(self) -> None:
        """Look for no plan above the incumbent, and set outer choices aside that are too large."""
        self.limit = self.incumbent * (1 + COST_TOLERANCE)
        self.too_large: list[OuterChoiceSolver] = []
        solvable: list[OuterChoiceSolver] = []
        for solver in self.solvers:
            large = too_many_segments(solver.table.pp, solver.table.num_layers)
            (self.too_large if large else solvable).append(solver)
        self.solvers = solvable

    def run(self) -> TableResult:
        """Return the best plan, and how far it is proven."""
        late = self._search()
        lower_bound = self._lower_bound()
        note = self._note(late)
        proven = not late and not note
        if self.best is None and self.uniform is not None:
            known = late or self.uniform.time <= self.limit
            self.best = self.uniform if known else None
        if proven and self.best is None and self.incumbent == inf:
            lower_bound = inf
        labels = sum(solver.labels for solver in self.solvers)
        return TableResult(self.best, lower_bound, proven, labels, note=note)

    def _search(self) -> bool:
        """Bound all outer choices, then search them; return whether the time was too short."""
        try:
            self._tighten_bounds()
            for found in rising_plans(self.solvers, self.space_kind, self.limit, self.check):
                self.best = found
                self.limit = min(self.limit, found.time)
        except DeadlineError:
            return True
        return False

    def _tighten_bounds(self) -> None:
        """Limit the search by the uniform plan, and bound the outer choices that this limit leaves."""
        limit = self.limit
        if self.uniform is not None:
            limit = min(limit, self.uniform.time * (1 + COST_TOLERANCE))
        for solver in self.solvers:
            if solver.bound <= limit:
                self.check()
                bound = outer_bound(solver.table, solver.outer, self.space_kind, limit)
                solver.bound = bound or solver.bound
        if limit == inf:
            # no plan at all costs more: where none is feasible the limit must stop somewhere
            every = [*self.solvers, *self.too_large]
            limit = max((solver.most_expensive() for solver in every), default=0.0)
        self.limit = limit

    def _lower_bound(self) -> float:
        best = self.best or self.uniform
        bounds = [solver.bound for solver in self.too_large]
        return min([least_open(self.solvers), inf if best is None else best.time, *bounds])

    def _note(self, late: bool) -> str:
        """Name outer choices that are too large and may have a plan within the limit."""
        left = [solver for solver in self.too_large if solver.bound <= self.limit]
        return too_large_note(((solver.table, solver.outer) for solver in left), late)
