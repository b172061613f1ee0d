"""Uniform plans with even stages for given (dp, tp, pp), as every trainer can run them."""

import time
from collections.abc import Iterable
from pathlib import Path

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.searcher import configuration_dicts, products
from darts_parallel.cost.table import build_table
from darts_parallel.errors import InfeasibleError, UnsupportedError
from darts_parallel.gradient.infeasibility import any_fits, explain_infeasible
from darts_parallel.plan.file import write_json
from darts_parallel.plan.space import outer_spaces
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem


def first_plan_that_fits(problem: Problem, degrees: Iterable[tuple[int, int, int]]) -> Plan:
    """The first (dp, tp, pp) that is legal and fits the memory, with its best remaining choices.

    Args:
        problem: What the plan is for.
        degrees: In the order of preference.

    Errors:
        InfeasibleError: none of them fits.
        UnsupportedError: the pins leave only plans that the Searcher report's model has no word for.
    """
    spaces = [space for space in outer_spaces(problem) if space.cp == space.virtual_stages == 1]
    tables = {space.pp: build_table(problem, space) for space in spaces}
    if not tables:
        raise UnsupportedError(
            "space.cp, space.virtual_stages: cost=searcher knows neither context parallelism nor "
            "interleaving; nearest legal: 1 and 1."
        )
    for dp, tp, pp in degrees:
        if pp not in tables:
            continue
        table = tables[pp]
        plans = even_uniform_plans(table)
        cost = evaluate_batch(table, plans)
        fits = cost.feasible.tolist()
        times = cost.iteration_time.tolist()
        mine = [
            (times[i], i)
            for i, choice in enumerate(plans.choices[:, 0].tolist())
            if fits[i] and (table.choices[choice].dp, table.choices[choice].tp) == (dp, tp)
        ]
        if mine:
            return plans.to_plan(min(mine)[1], table)
    ordered = list(tables.values())
    if not any_fits(problem, ordered):
        raise explain_infeasible(problem, ordered)
    raise InfeasibleError(
        f"memory: cost=searcher knows uniform plans with even stages only, and none of them fits "
        f"model={problem.model.config.name} on cluster={problem.cluster.name}; nearest legal: cost=analytic."
    )


def searcher_plan(problem: Problem, folder: Path | None) -> Plan:
    """Score every (dp, tp, pp), write all scores, and take the best that runs.

    Args:
        folder: Gets `configurations.json`; None: nothing is written.

    Errors:
        InfeasibleError: none of them fits.
    """
    began = time.perf_counter()
    data = configuration_dicts(problem, list(products(problem.cluster.num_devices)))
    data["seconds"] = time.perf_counter() - began
    degrees = [(entry["dp"], entry["tp"], entry["pp"]) for entry in data["configurations"]]
    plan = first_plan_that_fits(problem, degrees)
    if folder is not None:
        write_json(folder / "configurations.json", data)
    return plan
