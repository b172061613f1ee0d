"""From a problem to a verified plan: choose nodes, search, check, balance the stages."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice

from darts_parallel.cost import GAIN_TOLERANCE
from darts_parallel.errors import InfeasibleError, PlanError
from darts_parallel.exact import Verification
from darts_parallel.gradient import NoPlanFitsError, SearchResult
from darts_parallel.planner._memory_offers import with_offers
from darts_parallel.planner._searcher import product_session
from darts_parallel.planner._session import Asked, Reported, Session
from darts_parallel.planner._simplest import (
    NEIGHBOURS,
    TIE,
    neighbours,
    recomputed_first,
    simplest_within,
    with_one_end,
)
from darts_parallel.planner._stage_balance import balance_stages
from darts_parallel.planner.memory_chance import tightened, within_chance
from darts_parallel.planner.methods import METHODS, ORDERS, run_phases, search_result
from darts_parallel.planner.node_choice import Rental, rent
from darts_parallel.planner.prediction_intervals import out_of_memory
from darts_parallel.planner.result import Planned
from darts_parallel.planner.some_blocks import some_blocks_plan
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import read_plan
from darts_parallel.problem import Problem, price_per_hour, worth

LATE_SHARE = 0.1
"""Share of `search.max_seconds` that a search with more memory left free has, however late it begins."""


def plan(
    problem: Problem, *, rental: Rental | None = None, watcher: Watcher | None = None
) -> Planned:
    """Find a plan that keeps `space.out_of_memory` and check it, as `darts-parallel` does.

    Args:
        rental: How the nodes of the problem were chosen out of an offer (`choose_nodes`); None
            chooses them here where the objective may.

    Returns:
        The plan, how the search went, and what the checks say of it.

    Errors:
        InfeasibleError: no plan's median peak fits; names the binding constraint. Where a plan is
            priced, the lightest one is returned with the sentence as its warning.
        ConfigError: `search.method=exact` where no exact method reaches.
    """
    config = problem.config
    if config.plan is not None:
        batch = problem.training.global_batch_size
        return Planned(read_plan(config.plan, problem.model, batch=batch))
    if rental is None:
        problem, rental = choose_nodes(problem)
    try:
        found = _within_chance(problem, rental, watcher)
    except InfeasibleError as error:
        sentence = with_offers(str(error).removesuffix("."), problem, _within_chance)
        if config.price and isinstance(error, NoPlanFitsError):
            return Planned(error.lightest, warning=sentence)
        raise InfeasibleError(f"{sentence}.") from None
    if not found.warning:
        return found
    return replace(found, warning=with_offers(found.warning, tightened(problem), _within_chance))


def _within_chance(
    problem: Problem, rental: Rental | None = None, watcher: Watcher | None = None
) -> Planned:
    """Search and check a plan that keeps `space.out_of_memory`."""
    asked = Asked.of(problem, None if problem.config.cost.knows_stages else ())
    search = partial(_searched, asked, rental, watcher or Watcher())
    limit = problem.config.search.max_seconds
    deadline = time.monotonic() + limit

    def find(headroom: float) -> Planned:
        left = deadline - time.monotonic()
        return search(headroom, seconds=max(left, LATE_SHARE * limit))

    return within_chance(asked, find)


def plan_at_limits(problem: Problem, limits: Sequence[float]) -> list[Planned | None]:
    """Plan a problem for several values of `space.out_of_memory`; None where no plan's median peak fits.

    Searches do not know the limit, so each headroom is searched once.
    """
    asked = Asked.of(problem)
    search = cache(partial(_searched, asked, None, Watcher()))
    found: list[Planned | None] = []
    for limit in limits:
        limited = replace(problem, config=problem.config.with_space(out_of_memory=limit))
        try:
            found.append(within_chance(replace(asked, job=limited), search))
        except InfeasibleError:
            found.append(None)
    return found


def _searched(
    asked: Asked,
    rental: Rental | None,
    watcher: Watcher,
    headroom: float,
    seconds: float | None = None,
) -> Planned:
    """Search and check a plan of a problem that leaves a share of the memory free.

    Args:
        asked: The question with all memory; without tables where the cost model knows no stages.
        seconds: Limit of the search; None: `search.max_seconds`.
    """
    reported = Reported(watcher)
    knows_stages = bool(asked.tables)
    if knows_stages:
        session = Session(asked.at(headroom), METHODS, reported=reported)
    else:
        session = product_session(asked.problem.leaving_free(headroom), reported)
    if seconds is not None:
        session.asked = session.asked.within(seconds)
    *first, last = ORDERS[session.asked.settings.method]
    run_phases(session, first)
    session.found.answers |= asked.proofs.get(headroom, {})
    run_phases(session, (last,))
    result = search_result(session)
    if rental is not None and rental.iteration_time_s < result.iteration_time_s:
        result = rental.instead_of(result)
    if knows_stages:
        result = _simplified(result, session)
    answers = checked(result, session)
    if knows_stages:
        result = _with_some_blocks(result, session)
    compared = tuple(answer.with_gap(result.iteration_time_s) for answer in answers)
    chance = out_of_memory(result.plan, session.asked.problem)
    return Planned(
        result.plan,
        result,
        compared,
        reported.interrupted,
        rental,
        chance,
        files=reported.files,
        asked=session.asked,
    )


def _simplified(result: SearchResult, session: Session) -> SearchResult:
    """Return the result as the plan within `search.tie` that is easiest to run, with plans next to it.

    The plan of `search.method=exact` stays as fast as it is, and so does one whose easier form would
    break the budget or the deadline.
    """
    asked = session.asked
    uniform = session.found.uniform_plans
    chosen = result.plan
    tolerance = GAIN_TOLERANCE
    if asked.settings.method != "exact" and asked.settings.tie:
        limit = asked.seconds(chosen) * (1.0 + asked.settings.tie)
        others = [plan for seconds, plan in result.alternatives if seconds <= limit]
        chosen = simplest_within([chosen, *uniform, *others], asked, limit)
        tolerance = TIE
    chosen = balance_stages(chosen, asked, tolerance)
    chosen = with_one_end(chosen, uniform, asked)
    chosen = recomputed_first(chosen, asked)
    problem = asked.problem
    seconds = asked.seconds(chosen)
    if chosen != result.plan and worth(problem.config.objective, problem.cluster, seconds)[1]:
        result = replace(result, plan=chosen, iteration_time_s=seconds)
    near = islice(neighbours(result.plan, asked.tables), NEIGHBOURS)
    ranked = sorted({*result.alternatives, *near}, key=lambda entry: entry[0])
    return replace(result, alternatives=tuple(ranked))


def _with_some_blocks(result: SearchResult, session: Session) -> SearchResult:
    """Return the result with some blocks of stages recomputed, where that gains more than ties cost."""
    asked = session.asked
    found = some_blocks_plan(asked, result.iteration_time_s * (1.0 - asked.settings.tie))
    if found is None:
        return result
    uniform = (result.iteration_time_s, result.plan)
    return replace(
        result,
        plan=found.to_plan(asked.tables),
        iteration_time_s=found.time,
        alternatives=(uniform, *result.alternatives),
    )


def checked(result: SearchResult, session: Session) -> list[Verification]:
    """Return the answers of the methods; a claim that a plan of its space contradicts is no proof.

    Errors:
        PlanError: the plan lies outside of its space.
    """
    space_kind = session.asked.space_kind
    if not result.plan.within(space_kind):
        raise PlanError(f"space={space_kind} must hold the plan that was found; try search=exact.")
    answers = []
    for answer in session.found.answers.values():
        wrong = answer.space == space_kind and answer.contradicted(result.iteration_time_s)
        answers.append(answer.withdrawn() if wrong else answer)
    return answers


def choose_nodes(problem: Problem) -> tuple[Problem, Rental | None]:
    """Return the problem on the nodes that its objective chooses, and their plan, where it may choose."""
    objective = problem.config.objective
    if objective.in_dollars:
        price_per_hour(objective, problem.cluster)
    if not objective.choose_nodes or problem.config.plan is not None:
        return problem, None
    try:
        rental = rent(tightened(problem))
    except InfeasibleError:
        rental = rent(problem)
    return Problem.from_config(rental.config), rental
