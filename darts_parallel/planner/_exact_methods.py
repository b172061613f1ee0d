"""The methods that prove their plans: enumeration of uniform plans, dynamic programming over the space."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from darts_parallel.cost import CostTable, HardPlans, canonical, evaluate_batch, even_uniform_plans
from darts_parallel.exact import (
    MAX_PRICED_PLANS,
    Verification,
    find_layerwise_plan,
    find_simulated_plan,
    find_uniform_plan,
    number_of_plans,
)
from darts_parallel.gradient import repartitioned
from darts_parallel.planner._session import Method, Session
from darts_parallel.plans import Plan

RANKED = 4
"""Uniform configurations that are ranked with their best splits, for the report's alternatives."""
REPARTITIONED = 12
"""Outer choices that get a plan of their own among the alternatives."""


def enumerate_uniform(session: Session, deadline: float) -> None:
    """Find the best uniform plan, and where nothing has descended the plans that come next."""
    began = time.monotonic()
    if session.simulated:
        answer = _simulated(session, "exhaustive", "uniform", deadline)
    else:
        count = RANKED if session.result is None else 1
        even = _equal_chunks(session)
        found = find_uniform_plan(session.tables, deadline=deadline, count=count, even=even)
        session.uniform, answer = found, found.verification(session.tables, 0.0)
        if session.result is None:
            ranked = ((entry.time, entry.to_plan(session.tables)) for entry in found.alternatives)
            session.others = (*ranked, *_good_plans(session.tables))
    session.record("exhaustive", "uniform", answer, time.monotonic() - began)


def programme(session: Session, deadline: float) -> None:
    """Find the best plan of the space, or a bound on it, by dynamic programming."""
    began, space_kind = time.monotonic(), session.space_kind
    if session.simulated:
        answer = _simulated(session, "dynamic_programming", space_kind, deadline)
    else:
        known = float("inf") if session.result is None else session.result.iteration_time_s
        found = find_layerwise_plan(
            session.tables, space_kind, known, deadline, uniform=session.uniform
        )
        answer = found.verification(session.tables, 0.0)
        if found.best is not None and space_kind == "layerwise":
            # switches between equal strategies gain nothing
            table = session.tables[found.best.table]
            answer = replace(answer, plan=canonical(table, found.best.plan).to_plan(0, table))
    session.record("dynamic_programming", space_kind, answer, time.monotonic() - began)


def _simulated(session: Session, name: str, space_kind: str, deadline: float) -> Verification:
    """Return the answer for simulated pipelines."""

    def closed_form() -> Plan | None:
        twin = session.closed_form
        for method in ("exhaustive", name):
            if method not in twin.answers:
                twin.methods[method].run(twin, deadline)
        return twin.answers[name].plan

    return find_simulated_plan(
        session.tables, space_kind, closed_form, session.price, deadline=deadline
    )


def _equal_chunks(session: Session) -> bool:
    """Return whether interleaved plans are those of equal chunks alone, which are proven."""
    return session.settings.method == "exact" and session.space_kind == "uniform"


def _unable(session: Session) -> str:
    if any(table.host for table in session.tables):
        return "no exact method knows shares in host memory (space.offload)"
    if any(table.pipeline.free for table in session.tables):
        return "no exact method knows all orders of passes (searched)"
    if session.simulated and number_of_plans(session.tables, session.space_kind) > MAX_PRICED_PLANS:
        return "no exact method prices a simulated pipeline"
    if not _equal_chunks(session) and any(table.virtual_stages > 1 for table in session.tables):
        known = "search=exact space=uniform, whose chunks are equal"
        return f"exact methods only bound interleaved plans, but those of {known}"
    return ""


def _good_plans(tables: Sequence[CostTable]) -> Iterator[tuple[float, Plan]]:
    """Find a plan of one strategy for the best outer choices: stages even at first, then cut again."""
    found: list[tuple[float, int, HardPlans]] = []
    for number, table in enumerate(tables):
        plans = even_uniform_plans(table, ends_apart=table.virtual_stages > 1)
        times = _seconds(table, plans)
        for outer in range(table.num_outer):
            mine = torch.where(plans.outer == outer, times, torch.inf)
            if len(mine) and float(mine.min()) < float("inf"):
                best = int(mine.argmin())
                found.append((float(times[best]), number, plans[best : best + 1]))
    for _, number, plan in sorted(found, key=lambda entry: entry[:1])[:REPARTITIONED]:
        cut = tables[number].virtual_stages == 1
        plans = HardPlans.concatenate(
            [plan, *([repartitioned(tables[number], plan)] if cut else [])]
        )
        times = _seconds(tables[number], plans)
        best = int(times.argmin())
        yield float(times[best]), plans.to_plan(best, tables[number])


def _seconds(table: CostTable, plans: HardPlans) -> torch.Tensor:
    cost = evaluate_batch(table, plans)
    return cost.iteration_time.masked_fill(~cost.feasible, torch.inf)


EXHAUSTIVE = Method("exhaustive", enumerate_uniform, _unable)
DYNAMIC_PROGRAMMING = Method(
    "dynamic_programming", programme, _unable, lambda session: session.space_kind == "uniform"
)
