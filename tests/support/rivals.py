"""Answers of rivals to problems."""

import time
from dataclasses import replace

from baselines import Planner
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.result import Verification
from darts_parallel.problem.problem import Problem


def answer(
    solve: Planner, problem: Problem, *, budget: float | None = None, seed: int = 0
) -> Verification:
    """Plan the tables of a problem, within a budget of seconds."""
    began, tables = time.monotonic(), build_tables(problem)
    end = None if budget is None else began + budget
    result = solve(tables, deadline=end, seed=seed)
    return replace(result.verification(tables), seconds=time.monotonic() - began)
