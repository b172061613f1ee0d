"""Bounds, and solvers that prove their plans."""

from darts_parallel.exact.bounds import least_bound as least_bound
from darts_parallel.exact.bounds import lower_bound as lower_bound
from darts_parallel.exact.bounds import outer_bound as outer_bound
from darts_parallel.exact.bounds import outer_lower_bounds as outer_lower_bounds
from darts_parallel.exact.chosen_stages import ChosenStages as ChosenStages
from darts_parallel.exact.chosen_stages import balanced_plans as balanced_plans
from darts_parallel.exact.enumeration import number_of_plans as number_of_plans
from darts_parallel.exact.enumeration import number_of_slots as number_of_slots
from darts_parallel.exact.layerwise import find_layerwise_plan as find_layerwise_plan
from darts_parallel.exact.limits import SegmentBounds as SegmentBounds
from darts_parallel.exact.outer_choice import OuterChoiceSolver as OuterChoiceSolver
from darts_parallel.exact.result import LATE as LATE
from darts_parallel.exact.result import TOO_LARGE as TOO_LARGE
from darts_parallel.exact.result import USEFUL_SLACK as USEFUL_SLACK
from darts_parallel.exact.result import Check as Check
from darts_parallel.exact.result import DeadlineError as DeadlineError
from darts_parallel.exact.result import TableResult as TableResult
from darts_parallel.exact.result import Verification as Verification
from darts_parallel.exact.result import unknown_costs as unknown_costs
from darts_parallel.exact.segments import StageSegments as StageSegments
from darts_parallel.exact.simulated import MAX_PRICED_PLANS as MAX_PRICED_PLANS
from darts_parallel.exact.simulated import find_simulated_plan as find_simulated_plan
from darts_parallel.exact.simulated import simulated_lower_bound as simulated_lower_bound
from darts_parallel.exact.uniform import find_uniform_plan as find_uniform_plan
from darts_parallel.exact.uniform import find_uniform_within as find_uniform_within
