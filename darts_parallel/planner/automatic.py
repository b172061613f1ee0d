"""`search=auto`: which method a problem gets, and why.

The evidence is `experiments.compare`: where an exact method ends within seconds it is never slower than the
gradient search and never worse. So the exact ones are tried first, for a limited time; where they cannot
reach (simulated pipelines, interleaved plans) or do not end, the gradient search takes over, and what an
exact method finds within its budget, starting from the gradient search's plan, refines it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, PricedPlan, even_uniform_plans
from darts_parallel.cost.pruning import canonical
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.exact import layerwise as dynamic_programming
from darts_parallel.exact import uniform as exhaustive
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.result import Curve, PlannerResult, TableResult
from darts_parallel.exact.simulated import LIMIT, number_of_plans
from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.descent import search_tables
from darts_parallel.gradient.infeasibility import explain_infeasible
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.stage_moves import repartitioned
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.result import Planned
from darts_parallel.problem.problem import Problem

RANKED = 4
"""Uniform configurations that are ranked with their best splits, for the report's alternatives."""
REPARTITIONED = 12
"""Outer choices that get a plan of their own among the alternatives."""
FORCE = "search=gradient forces the gradient search"


@dataclass
class _Exact:
    """The exact methods' answers so far."""

    tables: Sequence[CostTable]
    space_kind: str
    budget: float
    simulated: bool = False
    began: float = field(default_factory=time.monotonic)
    method: str = ""
    best: TableResult | None = None
    """Answer of `method`."""
    others: tuple[tuple[float, Plan], ...] = ()
    """The best uniform configurations, each with its best split."""
    answers: tuple[tuple[str, str, PlannerResult], ...] = ()

    def run(self, show: Callable[[str], None]) -> None:
        """Enumerate the uniform plans, then prove the best of the space."""
        space_kind, deadline = self.space_kind, self.began + self.budget
        show("exhaustive")
        if self.simulated:
            uniform = brute_force(self.tables, "uniform")
        else:
            uniform = exhaustive.solve_uniform(self.tables, deadline=deadline, count=RANKED)
        self.others = tuple((entry.time, entry.to_plan(self.tables)) for entry in uniform.alternatives)
        self._keep("exhaustive", "uniform", uniform, self.began)
        if space_kind == "uniform":
            return
        show("dynamic programming")
        start = time.monotonic()
        if self.simulated:
            self._keep("exhaustive", space_kind, brute_force(self.tables, space_kind), start)
        else:
            best = dynamic_programming.solve(self.tables, space_kind, deadline=deadline)
            self._keep("dynamic_programming", space_kind, best, start)

    def _keep(self, name: str, space: str, answer: TableResult, start: float) -> None:
        self.method, self.best = name, answer
        entry = (name, space, answer.to_baseline(self.tables, time.monotonic() - start))
        # one answer of each name: the one over the whole space
        self.answers = (*(known for known in self.answers if known[0] != name), entry)

    @property
    def plans_evaluated(self) -> int:
        """By all of them."""
        return sum(entry.plans_evaluated for _, _, entry in self.answers)

    def result(
        self, answer: TableResult, seed: int, *, interrupted: bool, forced: bool = False
    ) -> SearchResult | None:
        """The plan as a search result; None without one."""
        if answer.best is None:
            return None
        plan = _in_words(answer.best, self.tables, self.space_kind)
        return SearchResult(
            plan=plan,
            iteration_time_s=answer.cost,
            raw_plan=plan,
            raw_iteration_time_s=answer.cost,
            alternatives=_of_other_degrees(plan, (*self.others, *_good_plans(self.tables))),
            history=(),
            seconds=time.monotonic() - self.began,
            steps=0,
            restarts=0,
            seed=seed,
            plans_evaluated=self.plans_evaluated,
            stopped_by="user" if interrupted else None if answer.proven else "time_limit",
            method=self.method,
            why=self._why(proven=answer.proven, interrupted=interrupted, forced=forced),
        )

    def _why(self, *, proven: bool, interrupted: bool, forced: bool) -> str:
        """Why the plan is an exact method's, in one clause."""
        if interrupted:
            return "interrupted; best plan so far"
        if not proven:
            return f"no proof within search.max_seconds={self.budget:g}; best plan so far"
        if forced:
            return "asked for by search.method=exact"
        if self.method == "exhaustive":
            return f"all plans are enumerated in a moment; {FORCE}"
        return f"it proved its plan within search.exact_seconds={self.budget:g}; {FORCE}"


def attempt(
    problem: Problem,
    show: Callable[[str], None] = lambda title: None,
    tables: Sequence[CostTable] | None = None,
    budget: float | None = None,
) -> tuple[Planned | None, str]:
    """Try the exact methods.

    Args:
        problem: What to search for.
        show: Told what is going on.
        tables: Cost tables of the whole space; None builds them.
        budget: Seconds, after which the best plan so far is an answer too; None: `search.exact_seconds`,
            after which only a proven plan is.

    Returns:
        The plan that they prove, or all there is; None where the gradient search has to do it. And why, in
        one clause for the report.

    Errors:
        InfeasibleError: it is proven that no plan fits; names the binding constraint.
    """
    settings, began, forced = problem.config.search, time.monotonic(), budget is not None
    seconds = exact_budget(settings) if budget is None else budget
    if tables is None:
        tables = build_tables(problem)
    reach = _out_of_reach(problem, tables)
    if reach or seconds == 0:
        return None, reach or "search.exact_seconds=0 leaves no time for exact methods"
    simulated = problem.config.cost.pipeline == "simulated"
    exact = _Exact(tables, problem.config.space.kind, seconds, simulated, began)
    interrupted = False
    try:
        exact.run(show)
    except KeyboardInterrupt:
        if exact.best is None or exact.best.best is None:
            raise
        interrupted = True
    assert exact.best is not None
    if exact.best.proven and exact.best.best is None:
        raise explain_infeasible(problem, tables)
    result = exact.result(exact.best, settings.seed, interrupted=interrupted, forced=forced)
    if result is None or not (exact.best.proven or interrupted or forced):
        key = "search.max_seconds" if forced else "search.exact_seconds"
        return None, f"exact search had no proof after {key}={seconds:g}"
    answers = [Verification.of(*known, result.iteration_time_s) for known in exact.answers]
    return Planned.of(result, answers, interrupted=interrupted), result.why


def exact_budget(settings: SearchConfig) -> float:
    """Seconds that the exact methods get."""
    return min(settings.exact_seconds, settings.max_seconds)


def solve(tables: Sequence[CostTable], space_kind: str, settings: SearchConfig, seed: int) -> PlannerResult:
    """The default's way over cost tables: exact methods, else the gradient search and a refinement.

    Args:
        tables: One for each pipeline degree, none interleaved and priced by the closed form.
        space_kind: Space.
        settings: Of the search; `max_seconds` limits the refinement as it does the search.
        seed: Of the gradient search.
    """
    exact = _Exact(tables, space_kind, exact_budget(settings))
    exact.run(lambda title: None)
    assert exact.best is not None
    tried, done = exact.best, time.monotonic() - exact.began
    curve = ((done, tried.cost),) if tried.best is not None else ()
    first = tried.to_baseline(tables, done)
    if tried.proven:
        return replace(first, plans_evaluated=exact.plans_evaluated, curve=curve)
    found = search_tables(tables, space_kind, settings, seed)
    known = min(tried.cost, float("inf") if found is None else found.iteration_time_s)
    searched = time.monotonic()
    better = dynamic_programming.solve(tables, space_kind, known, searched + settings.max_seconds)
    steps = [*curve, *((done + at, cost) for at, cost in (found.curve if found else ()))]
    steps.append((time.monotonic() - exact.began, min(known, better.cost)))
    count = exact.plans_evaluated + (found.plans_evaluated if found else 0) + better.plans_evaluated
    best = better.to_baseline(tables, time.monotonic() - exact.began)
    if better.cost >= known:
        plan = found.plan if found is not None and found.iteration_time_s == known else first.plan
        best = replace(best, plan=plan, iteration_time_s=known)
    return replace(best, plans_evaluated=count, curve=running_minimum(steps))


def running_minimum(steps: Sequence[tuple[float, float]]) -> Curve:
    """Of seconds and costs in the order of time those that are below all before."""
    kept: list[tuple[float, float]] = []
    for at, cost in steps:
        if cost < (kept[-1][1] if kept else float("inf")):
            kept.append((at, cost))
    return tuple(kept)


def _out_of_reach(problem: Problem, tables: Sequence[CostTable]) -> str:
    """Why no exact method can prove anything here, in a clause; empty where one can."""
    space_kind = problem.config.space.kind
    if problem.config.space.offload is not None:
        return "no exact method knows shares in host memory (space.offload)"
    if problem.config.cost.pipeline == "simulated" and number_of_plans(tables, space_kind) > LIMIT:
        return "no exact method prices a simulated pipeline"
    if any(table.virtual_stages > 1 for table in tables):
        return "exact methods only bound interleaved plans"
    return ""


def _in_words(best: PricedPlan, tables: Sequence[CostTable], space_kind: str) -> Plan:
    """The plan without switches that bring nothing."""
    table = tables[best.table]
    return (canonical(table, best.plan) if space_kind == "layerwise" else best.plan).to_plan(0, table)


def _good_plans(tables: Sequence[CostTable]) -> Iterator[tuple[float, Plan]]:
    """Of the best outer choices a plan of one strategy, its stages even at first and then cut anew."""
    found: list[tuple[float, int, HardPlans]] = []
    for number, table in enumerate(tables):
        plans = even_uniform_plans(table)
        times = _seconds(table, plans)
        for outer in range(table.num_outer):
            mine = torch.where(plans.outer == outer, times, torch.inf)
            if len(mine) and float(mine.min()) < float("inf"):
                best = int(mine.argmin())
                found.append((float(times[best]), number, plans[best : best + 1]))
    for _, number, plan in sorted(found, key=lambda entry: entry[:1])[:REPARTITIONED]:
        plans = HardPlans.concatenate([plan, repartitioned(tables[number], plan)])
        times = _seconds(tables[number], plans)
        best = int(times.argmin())
        yield float(times[best]), plans.to_plan(best, tables[number])


def _seconds(table: CostTable, plans: HardPlans) -> torch.Tensor:
    cost = evaluate_batch(table, plans)
    return cost.iteration_time.masked_fill(~cost.feasible, torch.inf)


def _of_other_degrees(plan: Plan, ranked: Sequence[tuple[float, Plan]]) -> tuple[tuple[float, Plan], ...]:
    """The best plan of every other pipeline degree and number of micro-batches, fastest first."""
    known = {(plan.pp, plan.num_micro_batches)}
    result = []
    for seconds, other in sorted(ranked, key=lambda entry: entry[0]):
        if (other.pp, other.num_micro_batches) not in known:
            known.add((other.pp, other.num_micro_batches))
            result.append((seconds, other))
    return tuple(result)


def refined(result: SearchResult, answers: Sequence[Verification], space_kind: str) -> SearchResult:
    """The result with a better plan that an exact method found, starting from the gradient search's.

    Args:
        result: Of the gradient search.
        answers: Of the exact methods, with its plan as incumbent.
        space_kind: Space of the problem; a uniform plan lies in every space.
    """
    better = [entry for entry in answers if entry.plan is not None and entry.gap > 0
              and entry.space in (space_kind, "uniform")]  # fmt: skip
    if not better:
        return result
    best = min(better, key=lambda entry: entry.iteration_time_s)
    assert best.plan is not None
    return replace(
        result,
        plan=best.plan,
        iteration_time_s=best.iteration_time_s,
        method=best.name,
    )
