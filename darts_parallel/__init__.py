"""Search of parallel training plans for Transformers by gradient descent on relaxed choices."""

# ruff: noqa: E402 - Ctrl-C is looked after before the imports that take long
from darts_parallel.errors import begin_imports, end_imports

_collecting = begin_imports()

from darts_parallel.cost import CostBreakdown as CostBreakdown
from darts_parallel.cost import evaluate as evaluate
from darts_parallel.errors import ConfigError as ConfigError
from darts_parallel.errors import DartsParallelError as DartsParallelError
from darts_parallel.errors import InfeasibleError as InfeasibleError
from darts_parallel.errors import PlanError as PlanError
from darts_parallel.errors import UnsupportedError as UnsupportedError
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

end_imports(_collecting)


def plan(problem: Problem) -> Planned:
    """Find a plan and check it, as the command does; errors as of `planner.plan` and `require_trainers`."""
    problem, rental = choose_nodes(problem)
    require_trainers(problem)
    return _plan(problem, rental=rental)
