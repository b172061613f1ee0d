"""Exhaustive search of uniform plans, and brute force: doors to `darts_parallel.exact`."""

from darts_parallel.exact.enumeration import brute_force as brute_force
from darts_parallel.exact.enumeration import find_plan_brute_force as find_plan_brute_force
from darts_parallel.exact.uniform import find_plan as find_plan
from darts_parallel.exact.uniform import solve_uniform as solve_uniform
