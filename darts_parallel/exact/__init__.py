"""Bounds, and solvers that prove their plans."""

from darts_parallel.exact.bounds import lower_bound as lower_bound
from darts_parallel.exact.result import PlannerResult as PlannerResult
from darts_parallel.exact.result import TableResult as TableResult
from darts_parallel.exact.verification import Verification as Verification
