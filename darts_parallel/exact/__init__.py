"""Bounds, and solvers that prove their plans."""

from darts_parallel.exact.bounds import lower_bound as lower_bound
from darts_parallel.exact.result import TableResult as TableResult
from darts_parallel.exact.result import Verification as Verification
