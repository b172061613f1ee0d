"""Collect the exports of the root. They take seconds to import, so the root imports them late."""

from darts_parallel.cost import CostBreakdown as CostBreakdown
from darts_parallel.cost import evaluate as evaluate
from darts_parallel.export import require_trainers
from darts_parallel.gradient import SearchResult as SearchResult
from darts_parallel.gradient import search as search
from darts_parallel.graph import ModuleGraph as ModuleGraph
from darts_parallel.planner import Planned as Planned
from darts_parallel.planner import choose_nodes
from darts_parallel.planner import plan as _plan
from darts_parallel.plans import LayerStrategy as LayerStrategy
from darts_parallel.plans import Plan as Plan
from darts_parallel.problem import Problem as Problem
from darts_parallel.problem import load_problem as load_problem


def plan(problem: Problem) -> Planned:
    """Find a plan and check it, as the command does; errors as of `planner.plan` and `require_trainers`."""
    problem, rental = choose_nodes(problem)
    require_trainers(problem)
    return _plan(problem, rental=rental)
