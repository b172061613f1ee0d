"""All methods that find or prove plans, and the orders and budgets in which `search.method` asks them.

`gradient`, the default, descends always, whatever the problem, and has its plan checked; `exact`
asks the exact methods alone; `auto` asks them for a moment and descends where they have no proof
(measured by `experiments.compare`: where an exact method ends within seconds it is never slower
than the gradient search and never worse). To add a method: one file with a `Method`, and an entry
in `METHODS` and the orders.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from darts_parallel.config import SearchConfig
from darts_parallel.cost import GAIN_TOLERANCE, Tables, without_dominated
from darts_parallel.errors import ConfigError
from darts_parallel.exact import LATE, TOO_LARGE, Verification
from darts_parallel.gradient import NoPlanFitsError, SearchResult
from darts_parallel.planner._descent_method import GRADIENT
from darts_parallel.planner._exact_methods import (
    DYNAMIC_PROGRAMMING,
    EXHAUSTIVE,
    uniform_plans,
)
from darts_parallel.planner._session import (
    CHECK_SECONDS,
    EXACT_SECONDS,
    SEARCH_SECONDS,
    Asked,
    Method,
    NamedPlan,
    Session,
    budgets,
)
from darts_parallel.plans import Plan

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


DESCENT = Phase((GRADIENT.name,), SEARCH_SECONDS)
CHECKS = Phase((EXHAUSTIVE.name, DYNAMIC_PROGRAMMING.name), CHECK_SECONDS)
EXACT_ALONE = replace(CHECKS, budget=SEARCH_SECONDS, alone=True)
EXACT_FIRST = replace(CHECKS, budget=EXACT_SECONDS, alone=True)
ORDERS: dict[str, tuple[Phase, ...]] = {
    "gradient": (DESCENT, CHECKS),
    "exact": (EXACT_ALONE,),
    "auto": (EXACT_FIRST, DESCENT, CHECKS),
}
FORCE = "search=gradient forces the gradient search"


def run_phases(session: Session, phases: Sequence[Phase]) -> None:
    """Ask one phase after the other, until the best plan of the space is proven.

    Errors:
        InfeasibleError: no plan fits; names the binding constraint.
    """
    reported = session.reported
    try:
        for phase in phases:
            if session.proven is None and not reported.interrupted:
                _run(session, phase)
    except KeyboardInterrupt:
        if session.best is None:
            raise
        reported.interrupted = True
        if session.found.result is not None:
            reported.watcher.say(
                "verification interrupted: the plan stands, unverified by what is missing."
            )


def _run(session: Session, phase: Phase) -> None:
    """Ask the methods of a phase that can prove more than is proven."""
    seconds = session.asked.budgets[phase.budget]
    methods = [session.methods[name] for name in phase.methods if name in session.methods]
    if phase.alone:
        idle = "" if seconds else f"{phase.budget}=0 leaves no time for exact methods"
        session.reported.why = methods[0].unable(session) or idle
        if session.reported.why:
            return
    deadline = time.monotonic() + seconds
    for method in methods if seconds else ():
        known = session.found.answers.get(method.name)
        if not method.useless(session) and (known is None or not known.proven):
            method.run(session, deadline)
    if phase.alone and session.proven is None:
        session.reported.why = f"exact search had no proof after {phase.budget}={seconds:g}"


def search_result(session: Session) -> SearchResult:
    """Return the best plan of a session as the result of a search.

    Errors:
        InfeasibleError: no plan fits, or none was found; names the binding constraint.
        ConfigError: `search.method=exact` where no exact method reaches.
    """
    asked = session.asked
    found = session.found
    reported = session.reported
    if found.result is not None:
        return refined(replace(found.result, why=reported.why), session)
    proven = session.proven
    answer = proven or session.best
    if not isinstance(answer, Verification) or answer.plan is None:
        descended = asked.settings.method != "exact" and not reported.interrupted
        if asked.job is not None and (proven is not None or descended):
            raise NoPlanFitsError(asked.job, asked.tables, proven is not None)
        raise ConfigError(
            f"search.method=exact has no plan: {reported.why}; try search.method=gradient."
        )
    too_large = answer.note.startswith(TOO_LARGE) and not answer.note.endswith(LATE)
    stopped_by = None if proven or too_large else "time_limit"
    if reported.interrupted:
        stopped_by = "user"
    known = (*found.others, *uniform_plans(session))
    others = _of_other_degrees(answer.plan, known)
    result = session.result(answer.plan, answer.iteration_time_s, others)
    why = _why_exact(session, answer.name)
    return replace(result, stopped_by=stopped_by, method=answer.name, why=why)


def refined(result: SearchResult, session: Session) -> SearchResult:
    """Return the result with the plan of an exact method, where that is better."""
    best = session.best
    if not isinstance(best, Verification) or best.plan is None:
        return result
    if best.iteration_time_s >= result.iteration_time_s * (1 - GAIN_TOLERANCE):
        return result
    return replace(result, plan=best.plan, iteration_time_s=best.iteration_time_s, method=best.name)


def _why_exact(session: Session, name: str) -> str:
    """Say in one clause why the plan is an exact method's."""
    asked = session.asked
    if session.reported.interrupted:
        return "interrupted; best plan so far"
    if asked.settings.method == "gradient":
        return "the descent met no plan that fits"
    if session.proven is None:
        note = session.found.answers[name].note
        if note.startswith(TOO_LARGE):
            return note
        return f"no proof within {SEARCH_SECONDS}; best plan so far"
    if asked.settings.method == "exact":
        return "asked for by search.method=exact"
    if name == EXHAUSTIVE.name:
        return f"all plans are enumerated in a moment; {FORCE}"
    seconds = asked.budgets[EXACT_SECONDS]
    return f"it proved its plan within {EXACT_SECONDS}={seconds:g}; {FORCE}"


def _of_other_degrees(plan: Plan, ranked: Sequence[NamedPlan]) -> tuple[NamedPlan, ...]:
    """Select the best plan of every other pipeline degree and number of micro-batches, fastest first."""
    known = {(plan.pp, plan.num_micro_batches)}
    result = []
    for seconds, other in sorted(ranked, key=lambda entry: entry[0]):
        if (other.pp, other.num_micro_batches) not in known:
            known.add((other.pp, other.num_micro_batches))
            result.append((seconds, other))
    return tuple(result)


def solve(tables: Tables, space_kind: str, settings: SearchConfig) -> Session:
    """Ask the methods of `search.method` about cost tables that the closed form prices.

    Args:
        settings: Settings of the search; `max_seconds` limits the checks as it does the search.
    """
    useful = [without_dominated(table) for table in tables]
    asked = Asked(useful, space_kind, settings, budgets(settings, settings.max_seconds))
    session = Session(asked, METHODS)
    run_phases(session, ORDERS[settings.method])
    return session
