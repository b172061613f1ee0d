"""`search=auto`: which method a problem gets, and why.

The evidence is `experiments.compare`: where an exact method ends within seconds it is never slower than the
gradient search and never worse. So the exact ones are tried first, for a limited time; where they cannot
reach (simulated pipelines, interleaved plans) or do not end, the gradient search takes over, and what an
exact method finds within its budget, starting from the gradient search's plan, refines it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baselines import dynamic_programming, exhaustive
from baselines.brute_force import brute_force
from baselines.result import BaselineResult, Candidate, TableResult
from baselines.simulated import LIMIT, number_of_plans
from darts_parallel.infeasible import explain_infeasible
from darts_parallel.problem import Problem
from darts_parallel.records import SearchResult
from darts_parallel.space import outer_spaces
from darts_parallel.strategy import Plan
from darts_parallel.table import CostTable, build_tables
from darts_parallel.tidy import tidy
from darts_parallel.verification import Verification

RANKED = 6
"""Uniform configurations that are ranked, for the report's alternatives."""
FORCE = "search=gradient forces the gradient search"


@dataclass(frozen=True)
class Attempt:
    """What the exact methods made of a problem."""

    result: SearchResult | None
    """Their plan, where it is proven or all there is; None: the gradient search has to do it."""
    why: str
    """One clause for the report."""
    answers: tuple[tuple[str, str, BaselineResult], ...] = ()
    """Name, space and answer of each, where there is a result."""
    interrupted: bool = False


def attempt(problem: Problem, show: Callable[[str], None] = lambda title: None) -> Attempt:
    """Try the exact methods for at most `search.exact_seconds`.

    Args:
        problem: What to search for.
        show: Told what is going on.

    Errors:
        InfeasibleError: it is proven that no plan fits; names the binding constraint.
    """
    settings, kind = problem.config.search, problem.config.space.kind
    budget = min(settings.exact_seconds, settings.max_seconds)
    began = time.monotonic()
    tables = build_tables(problem, outer_spaces(problem))
    reach = _out_of_reach(problem, tables)
    if reach or budget == 0:
        return Attempt(None, reach or "search.exact_seconds=0 leaves no time for exact methods")
    answers: list[tuple[str, str, BaselineResult]] = []
    best: tuple[str, TableResult] | None = None
    interrupted = False
    others: tuple[tuple[float, Plan], ...] = ()
    try:
        show("exhaustive")
        simulated = problem.config.cost.pipeline == "simulated"
        uniform = (brute_force(tables, "uniform") if simulated else
                   exhaustive.solve_uniform(tables, deadline=began + budget, count=RANKED))  # fmt: skip
        others = tuple((candidate.cost, candidate.to_plan(tables)) for candidate in uniform.alternatives)
        answers.append(("exhaustive", "uniform", uniform.to_baseline(tables, time.monotonic() - began)))
        best = ("exhaustive", uniform)
        if kind != "uniform":
            show("dynamic programming")
            start = time.monotonic()
            exact = (brute_force(tables, kind) if simulated else
                     dynamic_programming.solve(tables, kind, deadline=began + budget))  # fmt: skip
            answers.append(("dynamic_programming", kind, exact.to_baseline(tables, time.monotonic() - start)))
            best = ("dynamic_programming", exact)
    except KeyboardInterrupt:
        if best is None or best[1].best is None:
            raise
        interrupted = True
    method, answer = best
    if answer.proven and answer.best is None and not interrupted:
        raise explain_infeasible(problem, tables)
    if answer.best is None or not (answer.proven or interrupted):
        return Attempt(None, f"exact search had no proof after search.exact_seconds={budget:g}")
    why = {
        "exhaustive": f"all uniform plans are enumerated in a moment; {FORCE}",
        "dynamic_programming": f"it proved its plan within search.exact_seconds={budget:g}; {FORCE}",
    }[method]
    plan = _in_words(answer.best, tables, kind)
    result = SearchResult(
        plan=plan,
        iteration_time_s=answer.cost,
        raw_plan=plan,
        raw_iteration_time_s=answer.cost,
        alternatives=_of_other_degrees(plan, others),
        history=(),
        seconds=time.monotonic() - began,
        steps=0,
        restarts=0,
        seed=settings.seed,
        plans_evaluated=sum(entry.plans_evaluated for _, _, entry in answers),
        interrupted=interrupted,
        method=method,
        why="interrupted; best plan so far" if interrupted else why,
    )
    return Attempt(result, why, tuple(answers), interrupted)


def _out_of_reach(problem: Problem, tables: Sequence[CostTable]) -> str:
    """Why no exact method can prove anything here, in a clause; empty where one can."""
    kind = problem.config.space.kind
    if problem.config.cost.pipeline == "simulated" and number_of_plans(tables, kind) > LIMIT:
        return "no exact method prices a simulated pipeline"
    return ""


def _in_words(best: Candidate, tables: Sequence[CostTable], kind: str) -> Plan:
    """The plan without switches that bring nothing."""
    table = tables[best.table_index]
    return (tidy(table, best.plans) if kind == "layerwise" else best.plans).to_plan(0, table)


def _of_other_degrees(plan: Plan, ranked: Sequence[tuple[float, Plan]]) -> tuple[tuple[float, Plan], ...]:
    """The best plan of every other outer choice, fastest first."""
    known = {(plan.pp, plan.num_micro_batches)}
    result = []
    for seconds, other in ranked:
        if (other.pp, other.num_micro_batches) not in known:
            known.add((other.pp, other.num_micro_batches))
            result.append((seconds, other))
    return tuple(result)


def refined(result: SearchResult, answers: Sequence[Verification], kind: str) -> SearchResult:
    """The result with a better plan that an exact method found, starting from the gradient search's.

    Args:
        result: Of the gradient search.
        answers: Of the exact methods, with its plan as incumbent.
        kind: Space of the problem; a uniform plan lies in every space.
    """
    better = [entry for entry in answers if entry.plan is not None and entry.gap > 0
              and entry.space in (kind, "uniform")]  # fmt: skip
    if not better:
        return result
    best = min(better, key=lambda entry: entry.iteration_time_s)
    assert best.plan is not None
    return replace(
        result,
        plan=best.plan,
        iteration_time_s=best.iteration_time_s,
        method=f"gradient, refined by {best.name.replace('_', ' ')}",
    )
