"""The differentiable search: relaxation, descent, rounding, polishing."""

from darts_parallel.gradient.adam import EPSILON as EPSILON
from darts_parallel.gradient.adam import Adam as Adam
from darts_parallel.gradient.descent import GradientSearch as GradientSearch
from darts_parallel.gradient.descent import search as search
from darts_parallel.gradient.descent import search_tables as search_tables
from darts_parallel.gradient.infeasibility import any_fits as any_fits
from darts_parallel.gradient.infeasibility import explain_infeasible as explain_infeasible
from darts_parallel.gradient.polishing import polish as polish
from darts_parallel.gradient.pool import PlanPool as PlanPool
from darts_parallel.gradient.pool import TablePlans as TablePlans
from darts_parallel.gradient.pool_polishing import at_cut as at_cut
from darts_parallel.gradient.pool_polishing import polish_pool as polish_pool
from darts_parallel.gradient.pool_polishing import solve_outer as solve_outer
from darts_parallel.gradient.relaxation import Schedules as Schedules
from darts_parallel.gradient.relaxation import geometric as geometric
from darts_parallel.gradient.relaxed_cost import RelaxedPlans as RelaxedPlans
from darts_parallel.gradient.relaxed_cost import SurrogateCost as SurrogateCost
from darts_parallel.gradient.relaxed_cost import surrogate as surrogate
from darts_parallel.gradient.restarts import RestartBatch as RestartBatch
from darts_parallel.gradient.result import SearchResult as SearchResult
from darts_parallel.gradient.rounding import repair as repair
from darts_parallel.gradient.screening import MoveEvaluator as MoveEvaluator
from darts_parallel.gradient.stage_moves import repartitioned as repartitioned
from darts_parallel.gradient.step_record import LeadingPlan as LeadingPlan
from darts_parallel.gradient.step_record import StepRecord as StepRecord
from darts_parallel.gradient.winner import WinnerHistory as WinnerHistory
