"""Search of parallel training plans for Transformers by gradient descent on relaxed choices."""

from typing import TYPE_CHECKING

from darts_parallel.errors import ConfigError as ConfigError
from darts_parallel.errors import DartsParallelError as DartsParallelError
from darts_parallel.errors import InfeasibleError as InfeasibleError
from darts_parallel.errors import PlanError as PlanError
from darts_parallel.errors import UnsupportedError as UnsupportedError
from darts_parallel.errors import begin_start, lazy_names

if TYPE_CHECKING:
    from darts_parallel.api import CostBreakdown as CostBreakdown
    from darts_parallel.api import LayerStrategy as LayerStrategy
    from darts_parallel.api import ModuleGraph as ModuleGraph
    from darts_parallel.api import Plan as Plan
    from darts_parallel.api import Planned as Planned
    from darts_parallel.api import PlannedJob as PlannedJob
    from darts_parallel.api import PlanView as PlanView
    from darts_parallel.api import Problem as Problem
    from darts_parallel.api import SearchResult as SearchResult
    from darts_parallel.api import evaluate as evaluate
    from darts_parallel.api import load_problem as load_problem
    from darts_parallel.api import plan as plan
    from darts_parallel.api import search as search

__getattr__, __dir__ = lazy_names(__name__)

begin_start()
