"""Bounds, and solvers that prove their plans."""

from darts_parallel.exact.bounds import lower_bound as lower_bound
from darts_parallel.exact.layerwise import find_layerwise_plan as find_layerwise_plan
from darts_parallel.exact.result import TableResult as TableResult
from darts_parallel.exact.result import Verification as Verification
from darts_parallel.exact.simulated import find_simulated_plan as find_simulated_plan
from darts_parallel.exact.uniform import find_uniform_plan as find_uniform_plan
