"""Memory as a chance constraint: a job runs out of it with at most the chance `space.out_of_memory`.

The logarithm of a device's bytes is off by a normal error. Inside a search every device has `exp(-z s)` of
its memory: `z` is the normal quantile of the chance, `s` the largest standard deviation of any composition of
bytes, one number, so that the constraint stays additive and every bound and proof holds for the tightened
problem. The chance of the plan that comes out is then computed for the whole job, whose devices share their
errors (`uncertainty.any_above`); where it is above the limit the memory is tightened further. Where no plan
fits the tightened problem, it is loosened as little as needed; the median peak fits always.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from statistics import NormalDist

from darts_parallel.cost import CostTable, build_tables, evaluate, with_memory, without_dominated
from darts_parallel.errors import InfeasibleError
from darts_parallel.gradient import any_fits
from darts_parallel.planner._session import Session
from darts_parallel.planner._simplest import TIE, with_one_end
from darts_parallel.planner._stage_balance import balance_stages
from darts_parallel.planner.methods import CHECKS, METHODS, run_phases
from darts_parallel.planner.result import CHOSEN, Planned, Rung
from darts_parallel.planner.uncertainty import out_of_memory, posterior
from darts_parallel.problem import Problem

SURE = 0.01
"""Chance of running out of memory below which no plan of the ladder is safer."""
SAFER, MOST_EXTRA = 0.5, 0.15
"""Share of the chosen plan's chance that a safe plan has at most, and relative seconds that it may cost."""
ROUNDS = 4
"""Searches at most, each with less memory than the one before."""
LOOSER = (0.5, 0.25, 0.0)
"""Shares of what was left free, for further searches where the plan is twice as safe as asked for."""
LEAST = 0.02
"""Least tightening, of the logarithm of the memory."""
SAFE_TRIES = 4
"""Tightenings at most until the safe plan of a space is found."""
RUNG_SECONDS = 10.0
"""Seconds at most of the exact methods for another plan of the ladder, `fastest` or `safe`."""


def tightened(problem: Problem, chance: float | None = None) -> Problem:
    """Return the problem with as much of every device left free as a chance asks for.

    Args:
        chance: Of one device; None: `space.out_of_memory`.
    """
    known, chance = (
        posterior(problem),
        problem.config.space.out_of_memory if chance is None else chance,
    )
    if known is None or chance >= 0.5 or not problem.config.cost.knows_stages:
        return replace(problem, headroom=0.0)
    distance = 0.0
    for _ in range(8):  # settles: the less is used, the more of it is the software's reserve
        distance = _quantile(chance) * known.largest_memory_spread(problem, exp(-distance))
    return _moved(problem, distance)


def _quantile(chance: float) -> float:
    return -NormalDist().inv_cdf(min(max(chance, 1e-9), 1.0 - 1e-9))


def _moved(problem: Problem, distance: float) -> Problem:
    """Return the problem whose devices have `exp(-distance)` of their memory."""
    return replace(problem, headroom=1.0 - exp(-distance))


def within_chance(problem: Problem, find: Callable[[Problem], Planned]) -> Planned:
    """Return what a search finds on the problem, tightened until its plan keeps `space.out_of_memory`.

    Errors:
        InfeasibleError: no plan's median peak fits.
    """
    allowed, tight = problem.config.space.out_of_memory, tightened(problem)
    found, warning = None, f"no plan that keeps space.out_of_memory={allowed:g} was found"
    for _ in range(ROUNDS):
        try:
            found = find(tight)
        except InfeasibleError as error:
            return (
                replace(found, warning=warning) if found else _safest(problem, tight, find, error)
            )
        chance = out_of_memory(found.plan, tight)
        found = replace(found, problem=tight, out_of_memory=chance)
        if chance is None or chance <= allowed or not tight.headroom or found.interrupted:
            break
        known = posterior(problem)
        assert known is not None
        short = (_quantile(allowed) - _quantile(chance)) * known.largest_memory_spread(problem)
        tight = _moved(problem, -log(1.0 - tight.headroom) + max(2.0 * short, LEAST))
    else:
        assert found is not None
        return replace(found, warning=warning)
    distance = -log(1.0 - tight.headroom)
    for share in LOOSER:  # one spread for all compositions may leave more free than the plan needs
        chance = found.out_of_memory
        if chance is None or chance > allowed / 2.0 or not distance or found.interrupted:
            break
        if (chance < SURE / 100.0 or not share) and not _gains(problem, found):
            break
        own = find(tight := _moved(problem, share * distance))
        found = replace(found, interrupted=own.interrupted)
        chance = out_of_memory(own.plan, tight)
        if chance is None or chance > allowed or own.interrupted:
            break
        new, old = (p.result.iteration_time_s if p.result else 0.0 for p in (own, found))
        if new <= old * (1.0 - TIE):
            found = replace(own, problem=tight, out_of_memory=chance)
    return found


def _gains(problem: Problem, found: Planned) -> bool:
    """Return whether exact methods know a faster plan whose median peak fits."""
    tables, kind = _checked(problem, found), problem.config.space.kind
    if found.result is None or not tables:
        return False
    rung = _rung("fastest", tightened(problem, 0.5), tables, found, RUNG_SECONDS, kind)
    return rung is not None and rung.seconds < found.result.iteration_time_s * (1.0 - 2.0 * TIE)


def _checked(problem: Problem, found: Planned) -> list[CostTable]:
    """Return the tables that exact methods check; none of simulated or unchecked jobs."""
    config = problem.config
    closed = config.cost.pipeline == "closed_form" and config.space.offload is None
    return (
        [without_dominated(t) for t in found.tables]
        if closed and config.verification.enabled
        else []
    )


def _safest(
    problem: Problem, tight: Problem, find: Callable[[Problem], Planned], error: InfeasibleError
) -> Planned:
    """Plan with as much memory left free as some plan allows; the error says what would help."""
    if not tight.headroom:
        raise error
    low, high, tables = 0.0, -log(1.0 - tight.headroom), build_tables(tight)
    for _ in range(6):  # halves the way to the tightest memory that some plan fits
        middle = (low + high) / 2.0
        own = _moved(problem, middle)
        own_tables = [with_memory(table, own.cluster, own.margin) for table in tables]
        fits = any_fits(own_tables, own.config.space.kind)
        low, high = (middle, high) if fits else (low, middle)
    for distance in (low, low / 2.0, 0.0):
        own = _moved(problem, distance)
        try:
            found = find(own)
        except InfeasibleError as unfit:
            if not distance:
                raise unfit from None
            continue
        ways = str(error).partition("smallest changes that help: ")[2].removesuffix(".")
        why = f"no plan keeps space.out_of_memory={problem.config.space.out_of_memory:g}; it takes {ways}"
        return replace(
            found, problem=own, out_of_memory=out_of_memory(found.plan, own), warning=why
        )
    raise error


def ladder(planned: Planned, problem: Problem) -> list[Rung]:
    """Return plans around the chosen one: the fastest whose median fits, itself, and a safe one.

    The fastest is left out where it gains no more than ties may cost. The safe one is the cheapest that is
    met with at most half the chosen plan's chance of running out of memory (`SAFER`); it is left out where
    the chosen one fits with 99 % (`SURE`), or where such a plan costs more than `MOST_EXTRA`. They come from
    the exact methods, each within `RUNG_SECONDS`, where plans are checked at all.
    """
    tight, result, kind = planned.problem, planned.result, problem.config.space.kind
    if tight is None or result is None or planned.out_of_memory is None:
        return []
    chosen = Rung(CHOSEN, planned.plan, result.iteration_time_s, planned.out_of_memory)
    found: list[Rung | None] = [chosen]
    if tables := _checked(problem, planned):
        if tight.headroom:
            fastest = _rung("fastest", tightened(problem, 0.5), tables, planned, RUNG_SECONDS, kind)
            found += (
                [fastest]
                if fastest and fastest.seconds < chosen.seconds * (1.0 - 2.0 * TIE)
                else []
            )
        if chosen.chance > SURE:  # uniform plans take a tenth of the seconds, so that one is known
            safe = [_safe(problem, chosen, tables, own) for own in dict.fromkeys(("uniform", kind))]
            found += sorted(filter(None, safe), key=lambda rung: rung.seconds)[:1]
    return sorted(filter(None, found), key=lambda rung: rung.seconds)


def _safe(problem: Problem, chosen: Rung, tables: Sequence[CostTable], kind: str) -> Rung | None:
    """Return the safe plan of the ladder: memory is tightened from the chosen plan's on, by growing steps."""
    known, deadline = posterior(problem), time.monotonic() + RUNG_SECONDS
    cost = evaluate(chosen.plan, problem)
    assert known is not None
    room = min(
        log(own / used) for own, used in zip(cost.capacity_bytes, cost.memory_bytes, strict=True)
    )
    chance, wanted = chosen.chance, SAFER * chosen.chance
    spread = max(
        known.memory_spread(problem), room / _quantile(min(chance, 0.49))
    )  # as the chosen plan's
    for tries in range(SAFE_TRIES):
        room += (1 + tries) * max((_quantile(wanted) - _quantile(chance)) * spread, LEAST / 2.0)
        rung = _rung("safe", _moved(problem, room), tables, None, deadline - time.monotonic(), kind)
        if rung is None or rung.seconds > chosen.seconds * (1.0 + MOST_EXTRA):
            return None
        if rung.chance <= wanted:
            return rung if rung.seconds > chosen.seconds else None
        chance = rung.chance
    return None


def _rung(
    name: str,
    problem: Problem,
    tables: Sequence[CostTable],
    known: Planned | None,
    seconds: float,
    kind: str,
) -> Rung | None:
    """Return the best plan of a problem by exact methods; None where none was found in time.

    Args:
        tables: Costs, whatever their memory.
        known: A plan that is feasible there, which bounds the search of so many seconds of wall-clock.
    """
    own = [with_memory(table, problem.cluster, problem.margin) for table in tables]
    session = Session(own, kind, problem.config.search, problem, methods=METHODS)
    session.result = None if known is None else known.result
    session.budgets = {CHECKS.budget: seconds}
    run_phases(session, (CHECKS,))
    best = session.best
    if best is None or best.plan is None:
        return None
    uniform = [
        a.plan for a in session.answers.values() if a.plan is not None and a.plan.within("uniform")
    ]
    plan = with_one_end(balance_stages(best.plan, problem), uniform, problem)
    chance = out_of_memory(plan, problem)
    return (
        None
        if chance is None
        else Rung(name, plan, evaluate(plan, problem).iteration_time_s, chance)
    )
