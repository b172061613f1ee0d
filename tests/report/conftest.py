"""The search that the reports of these tests show."""

from typing import NamedTuple

import pytest

from darts_parallel import evaluate, load_problem, search
from darts_parallel.cost.evaluation import CostBreakdown
from darts_parallel.gradient.step_record import SearchResult
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.problem import Problem


class FoundPlan(NamedTuple):
    """Hold a problem, what was found for it, the plan and its cost."""

    problem: Problem
    result: SearchResult
    plan: Plan
    cost: CostBreakdown


@pytest.fixture(scope="session")
def found() -> FoundPlan:
    """A search of 20 steps for the toy on four stages."""
    overrides = ["model=toy", "cluster=toy", "training=toy", "space.pp=4"]
    problem = load_problem([*overrides, "search.num_steps=20", "search.num_restarts=2"])
    result = search(problem, seed=0)
    return FoundPlan(problem, result, result.plan, evaluate(result.plan, problem))
