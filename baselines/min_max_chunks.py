"""Chunks of least maximum (PipeDream, Narayanan et al. 2019): every strategy, the longest chunk short."""

from collections.abc import Sequence

import torch

from baselines.incumbent import Incumbent
from baselines.planner import on_problems
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.chosen_stages import balanced
from darts_parallel.exact.result import TableResult


def solve(
    tables: Sequence[CostTable], space_kind: str, *, deadline: float | None = None, seed: int = 0
) -> TableResult:
    """The best of them; arguments as `random_search.solve`."""
    incumbent = Incumbent(tables, deadline)
    for number, table in enumerate(incumbent.tables):
        for outer, choice in torch.nonzero(table.allowed).tolist():
            if incumbent.over():
                return incumbent.result()
            incumbent.offer(number, balanced(table, outer, choice))
    return incumbent.result()


find_plan = on_problems(solve)
