"""From a problem to a verified plan: choose nodes, search, check, balance the stages."""

from dataclasses import replace
from itertools import islice

from darts_parallel.cost import evaluate
from darts_parallel.errors import InfeasibleError, PlanError
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner._searcher import product_session
from darts_parallel.planner._session import Session
from darts_parallel.planner._simplest import NEIGHBOURS, TIE, neighbours, simplest, with_one_end
from darts_parallel.planner._stage_balance import balance_stages
from darts_parallel.planner.memory_chance import tightened, within_chance
from darts_parallel.planner.methods import METHODS, ORDERS, run_phases, search_result
from darts_parallel.planner.node_choice import Rental, rent
from darts_parallel.planner.result import Planned
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import read_plan
from darts_parallel.problem import Problem, price_per_hour


def plan(
    problem: Problem, *, rental: Rental | None = None, watcher: Watcher | None = None
) -> Planned:
    """Find a plan that keeps `space.out_of_memory` and check it, as the command `darts-parallel` does.

    Args:
        rental: How the nodes of the problem were chosen out of an offer (`choose_nodes`); None chooses
            them here where the objective may.

    Returns:
        The plan, how the search went, and what the checks say of it.

    Errors:
        InfeasibleError: no plan's median peak fits; names the binding constraint.
        ConfigError: `search.method=exact` where no exact method reaches.
    """
    config = problem.config
    if config.plan is not None:
        return Planned(read_plan(config.plan, problem.model))
    if rental is None:
        problem, rental = choose_nodes(problem)
    return within_chance(problem, lambda tight: _searched(tight, rental, watcher))


def _searched(problem: Problem, rental: Rental | None, watcher: Watcher | None) -> Planned:
    """Search and check a plan of a problem."""
    config, session = problem.config, new_session(problem, watcher)
    run_phases(session, ORDERS[config.search.method])
    result = search_result(session)
    if rental is not None and rental.iteration_time_s < result.iteration_time_s:
        result = rental.instead_of(result)
    if config.cost.knows_stages:
        chosen = result.plan
        others = [answer.plan for answer in session.answers.values() if answer.plan is not None]
        uniform = [own for own in others if own.within("uniform")]
        if config.search.method != "exact":
            chosen = simplest(chosen, uniform, problem)
        chosen = balance_stages(
            chosen, problem, *([] if config.search.method == "exact" else [TIE])
        )
        chosen = with_one_end(chosen, uniform, problem)
        if chosen != result.plan:
            seconds = evaluate(chosen, problem).iteration_time_s
            result = replace(result, plan=chosen, iteration_time_s=seconds)
        near = islice(neighbours(result.plan, session.tables), NEIGHBOURS)
        ranked = sorted({*result.alternatives, *near}, key=lambda entry: entry[0])
        result = replace(result, alternatives=tuple(ranked))
    answers = checked(result, session)
    return Planned(
        result.plan,
        result,
        answers,
        session.interrupted,
        rental=rental,
        files=session.files,
        tables=session.whole,
    )


def checked(result: SearchResult, session: Session) -> tuple[Verification, ...]:
    """Return what the methods say of a result; a claim that a plan of its space contradicts is no proof.

    Errors:
        PlanError: the plan lies outside of its space.
    """
    space_kind, seconds = session.space_kind, result.iteration_time_s
    if not result.plan.within(space_kind):
        raise PlanError(f"space={space_kind} must hold the plan that was found; try search=exact.")
    answers = (
        answer.withdrawn()
        if answer.space == space_kind and answer.contradicted(seconds)
        else answer
        for answer in session.answers.values()
    )
    return tuple(answer.with_gap(seconds) for answer in answers)


def new_session(problem: Problem, watcher: Watcher | None = None) -> Session:
    """Begin with a problem, by the methods that know its cost model."""
    if problem.config.cost.knows_stages:
        return Session.of(problem, METHODS, watcher)
    return product_session(problem, watcher)


def choose_nodes(problem: Problem) -> tuple[Problem, Rental | None]:
    """Return the problem on the nodes that its objective chooses, and their plan, where it may choose."""
    objective = problem.config.objective
    if objective.name != "time":
        price_per_hour(objective, problem.cluster)
    if not objective.choose_nodes or problem.config.plan is not None:
        return problem, None
    try:
        rental = rent(tightened(problem))
    except InfeasibleError:
        rental = rent(problem)
    return rental.problem, rental
