"""All methods that find or prove plans, and the orders and budgets in which `search.method` asks them.

`gradient`, the default, descends always, whatever the problem, and has its plan checked; `exact` asks the
exact methods alone; `auto` asks them for a moment and descends where they have no proof (measured by
`experiments.compare`: where an exact method ends within seconds it is never slower than the gradient search
and never worse). To add a method: one file with a `Method`, and an entry in `METHODS` and the orders.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from darts_parallel.config import SearchConfig
from darts_parallel.cost import CostTable, without_dominated
from darts_parallel.errors import ConfigError
from darts_parallel.exact import TableResult, Verification
from darts_parallel.gradient import SearchResult, explain_infeasible
from darts_parallel.planner._descent_method import GRADIENT
from darts_parallel.planner._exact_methods import DYNAMIC_PROGRAMMING, EXHAUSTIVE
from darts_parallel.planner._session import Method, Session, budgets
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

METHODS: dict[str, Method] = {
    method.name: method for method in (GRADIENT, EXHAUSTIVE, DYNAMIC_PROGRAMMING)
}


@dataclass(frozen=True)
class Phase:
    """Methods that share a budget."""

    methods: tuple[str, ...]
    budget: str
    """Key of its seconds."""
    alone: bool = False
    """Whether only a proof ends the search here, so that methods that cannot give one are not asked."""


DESCENT = Phase(("gradient",), "search.max_seconds")
CHECKS = Phase(("exhaustive", "dynamic_programming"), "verification.max_seconds")
ORDERS: dict[str, tuple[Phase, ...]] = {
    "gradient": (DESCENT, CHECKS),
    "exact": (replace(CHECKS, budget="search.max_seconds", alone=True),),
    "auto": (replace(CHECKS, budget="search.exact_seconds", alone=True), DESCENT, CHECKS),
}
FORCE = "search=gradient forces the gradient search"
ROUNDING = 1e-12
"""Relative difference of seconds that is none."""


def run_phases(session: Session, phases: Sequence[Phase]) -> None:
    """Ask one phase after the other, until the best plan of the space is proven.

    Errors:
        InfeasibleError: no plan fits; names the binding constraint.
    """
    try:
        for phase in phases:
            if session.proven is None and not session.interrupted:
                _run(session, phase)
    except KeyboardInterrupt:
        if session.best is None:
            raise
        session.interrupted = True
        if session.result is not None:
            session.watcher.say(
                "verification interrupted: the plan stands, unverified by what is missing."
            )


def _run(session: Session, phase: Phase) -> None:
    seconds = session.budgets[phase.budget]
    methods = [session.methods[name] for name in phase.methods if name in session.methods]
    if phase.alone:
        idle = "" if seconds else f"{phase.budget}=0 leaves no time for exact methods"
        session.why = methods[0].unable(session) or idle
    if not seconds or (phase.alone and session.why):
        return
    deadline = time.monotonic() + seconds
    for method in methods:
        known = session.answers.get(method.name)
        if not method.useless(session) and (known is None or not known.proven):
            method.run(session, deadline)
    if phase.alone and session.proven is None:
        session.why = f"exact search had no proof after {phase.budget}={seconds:g}"


def search_result(session: Session) -> SearchResult:
    """Return the best plan of a session as the result of a search.

    Errors:
        InfeasibleError: no plan fits, or none was found; names the binding constraint.
        ConfigError: `search.method=exact` where no exact method reaches.
    """
    if session.result is not None:
        return refined(replace(session.result, why=session.why), session)
    answer, proven = session.proven or session.best, session.proven is not None
    descended = session.settings.method != "exact" and not session.interrupted
    if (
        session.problem is not None
        and (answer is None or answer.plan is None)
        and (proven or descended)
    ):
        raise explain_infeasible(session.problem, session.tables, proven=proven)
    if not isinstance(answer, Verification) or answer.plan is None:
        raise ConfigError(
            f"search.method=exact has no plan: {session.why}; try search.method=gradient."
        )
    return SearchResult(
        plan=answer.plan,
        iteration_time_s=answer.iteration_time_s,
        raw_plan=answer.plan,
        raw_iteration_time_s=answer.iteration_time_s,
        alternatives=_of_other_degrees(answer.plan, session.others),
        history=(),
        seconds=time.monotonic() - session.began,
        steps=0,
        restarts=0,
        seed=session.settings.seed,
        plans_evaluated=session.plans_evaluated,
        stopped_by="user" if session.interrupted else None if session.proven else "time_limit",
        method=answer.name,
        why=_why_exact(session, answer.name),
    )


def refined(result: SearchResult, session: Session) -> SearchResult:
    """Return the result with the plan of an exact method, where that is better."""
    best = session.best
    if not isinstance(best, Verification) or best.plan is None:
        return result
    if best.iteration_time_s >= result.iteration_time_s * (1 - ROUNDING):
        return result
    return replace(result, plan=best.plan, iteration_time_s=best.iteration_time_s, method=best.name)


def _why_exact(session: Session, name: str) -> str:
    """Say in one clause why the plan is an exact method's."""
    if session.interrupted:
        return "interrupted; best plan so far"
    if session.settings.method == "gradient":
        return "the descent met no plan that fits"
    if session.proven is None:
        seconds = session.budgets["search.max_seconds"]
        return f"no proof within search.max_seconds={seconds:g}; best plan so far"
    if session.settings.method == "exact":
        return "asked for by search.method=exact"
    if name == "exhaustive":
        return f"all plans are enumerated in a moment; {FORCE}"
    seconds = session.budgets["search.exact_seconds"]
    return f"it proved its plan within search.exact_seconds={seconds:g}; {FORCE}"


def _of_other_degrees(
    plan: Plan, ranked: Sequence[tuple[float, Plan]]
) -> tuple[tuple[float, Plan], ...]:
    """Select the best plan of every other pipeline degree and number of micro-batches, fastest first."""
    known = {(plan.pp, plan.num_micro_batches)}
    result = []
    for seconds, other in sorted(ranked, key=lambda entry: entry[0]):
        if (other.pp, other.num_micro_batches) not in known:
            known.add((other.pp, other.num_micro_batches))
            result.append((seconds, other))
    return tuple(result)


def solve(
    tables: Sequence[CostTable], space_kind: str, settings: SearchConfig, method: str = "auto"
) -> Verification:
    """Solve cost tables, priced by the closed form, in the order of a `search.method`.

    Args:
        settings: Settings of the search; `max_seconds` limits the checks as it does the search.
    """
    session = Session(
        [without_dominated(table) for table in tables], space_kind, settings, methods=METHODS
    )
    session.budgets = budgets(settings, settings.max_seconds)
    run_phases(session, ORDERS[method])
    floor = max(
        (a.lower_bound_s for a in session.answers.values() if a.space == space_kind), default=0.0
    )
    none = TableResult(None, floor, session.proven is not None, 0)
    answer = none.verification(tables, time.monotonic() - session.began, method, space_kind)
    best = session.best
    if best is not None:
        answer = replace(answer, plan=best.plan, iteration_time_s=best.iteration_time_s)
    return replace(answer, plans_evaluated=session.plans_evaluated, curve=tuple(session.curve))


def check(
    problem: Problem, name: str = "dynamic_programming", seconds: float = float("inf")
) -> Verification:
    """Ask one exact method about a problem."""
    session = Session.of(problem, METHODS)
    METHODS[name].run(session, time.monotonic() + seconds)
    return session.answers[name]
