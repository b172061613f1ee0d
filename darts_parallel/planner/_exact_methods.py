"""The methods that prove their plans: enumeration of uniform plans, dynamic programming over the space."""

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from darts_parallel.cost import (
    Tables,
    canonical,
    even_uniform_plans,
)
from darts_parallel.exact import (
    MAX_PRICED_PLANS,
    Verification,
    find_layerwise_plan,
    find_simulated_plan,
    find_uniform_plan,
    number_of_plans,
    unknown_costs,
)
from darts_parallel.gradient import PlanPool, repartitioned
from darts_parallel.planner._session import Method, NamedPlan, Session
from darts_parallel.plans import Plan

RANKED = 4
"""Uniform configurations that are ranked with their best splits, for the report's alternatives."""
REPARTITIONED = 12
"""Pipeline configurations that get a plan of their own among the alternatives."""


def enumerate_uniform(session: Session, deadline: float) -> None:
    """Find the best uniform plan, and where nothing has descended the ones that come next."""
    began = time.monotonic()
    asked = session.asked
    found = session.found
    if asked.simulated:
        answer = _simulated(session, "exhaustive", "uniform", deadline)
    else:
        count = RANKED if found.result is None else 1
        even = _equal_chunks(session)
        uniform = find_uniform_plan(asked.tables, deadline=deadline, count=count, even=even)
        found.uniform = uniform
        answer = uniform.verification(asked.tables)
    session.record("exhaustive", "uniform", answer, time.monotonic() - began)


def programme(session: Session, deadline: float) -> None:
    """Find the best plan of the space, or a bound on it, by dynamic programming."""
    began = time.monotonic()
    asked = session.asked
    found = session.found
    if asked.simulated:
        answer = _simulated(session, "dynamic_programming", asked.space_kind, deadline)
    else:
        known = inf if found.result is None else found.result.iteration_time_s
        solved = find_layerwise_plan(
            asked.tables, asked.space_kind, known, deadline, uniform=found.uniform
        )
        answer = solved.verification(asked.tables)
        if solved.best is not None and asked.space_kind == "layerwise":
            # switches between equal strategies gain nothing
            table = asked.tables[solved.best.table]
            plain = canonical(table, solved.best.plan)
            answer = replace(answer, plan=plain.to_plan(0, table))
    session.record("dynamic_programming", asked.space_kind, answer, time.monotonic() - began)


def _simulated(
    session: Session,
    name: str,
    space_kind: str,
    deadline: float,
) -> Verification:
    """Return the answer for simulated pipelines."""

    def closed_form() -> Plan | None:
        twin = session.closed_form
        for method in ("exhaustive", name):
            if method not in twin.found.answers:
                twin.methods[method].run(twin, deadline)
        return twin.found.answers[name].plan

    asked = session.asked
    return find_simulated_plan(
        asked.tables, space_kind, closed_form, asked.price, deadline=deadline
    )


def _equal_chunks(session: Session) -> bool:
    """Return whether interleaved plans are the plans of equal chunks alone, which are proven."""
    return session.asked.settings.method == "exact" and session.asked.space_kind == "uniform"


def _unable(session: Session) -> str:
    asked = session.asked
    unknown = unknown_costs(asked.tables)
    if unknown:
        return f"no exact method applies: {unknown}"
    if any(table.pipeline.free for table in asked.tables):
        return "no exact method knows all orders of passes (searched)"
    if asked.simulated and number_of_plans(asked.tables, asked.space_kind) > MAX_PRICED_PLANS:
        return "no exact method prices a simulated pipeline"
    if not _equal_chunks(session) and any(table.virtual_stages > 1 for table in asked.tables):
        known = "search=exact space=uniform, whose chunks are equal"
        return f"exact methods only bound interleaved plans, but those of {known}"
    return ""


def uniform_plans(session: Session) -> Iterator[NamedPlan]:
    """Find good plans of one strategy, where the exact methods have enumerated them."""
    tables = session.asked.tables
    if session.found.uniform is not None:
        for own in session.found.uniform.alternatives:
            yield own.time, own.to_plan(tables)
        for own in even_pool(tables, REPARTITIONED).by_outer()[:REPARTITIONED]:
            yield own.time, own.to_plan(tables)


def even_pool(tables: Tables, count: int) -> PlanPool:
    """Return plans of one strategy on even stages; the best `count` configurations are cut again, too."""
    pool = PlanPool(list(tables), "uniform")
    for number, table in enumerate(tables):
        pool.add(number, even_uniform_plans(table, ends_apart=table.virtual_stages > 1))
    for entry in pool.by_outer()[:count]:
        table = tables[entry.table]
        if table.virtual_stages == 1:
            pool.add(entry.table, repartitioned(table, entry.plan))
    return pool


EXHAUSTIVE = Method("exhaustive", enumerate_uniform, _unable)
DYNAMIC_PROGRAMMING = Method(
    "dynamic_programming",
    programme,
    _unable,
    useless=lambda session: session.asked.space_kind == "uniform",
)
