"""From a problem to a verified plan."""

from darts_parallel.planner.elasticities import sensitivity as sensitivity
from darts_parallel.planner.planning import plan as plan
from darts_parallel.planner.replanning import replan as replan
from darts_parallel.planner.result import Planned as Planned
from darts_parallel.planner.tuning import tune as tune
from darts_parallel.planner.watcher import Watcher as Watcher
