"""Even splits: every schedule, number of chunks and strategy for all layers, stages as even as they can be.

What Megatron-LM and torchtitan do where the user gives no layout (Narayanan et al. 2021, arXiv 2104.04473).
"""

from collections.abc import Sequence

from baselines.incumbent import Incumbent
from baselines.planner import on_problems
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import TableResult


def solve(
    tables: Sequence[CostTable], space_kind: str, *, deadline: float | None = None, seed: int = 0
) -> TableResult:
    """The best of them; arguments as `random_search.solve`."""
    incumbent = Incumbent(tables, deadline)
    for number, table in enumerate(incumbent.tables):
        if incumbent.over():
            break
        incumbent.offer(number, even_uniform_plans(table))
    return incumbent.result()


find_plan = on_problems(solve)
