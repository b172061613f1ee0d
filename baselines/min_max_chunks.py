"""Chunks of least maximum: every strategy for all layers, the longest chunk as short as it can be.

The linear partition problem that PipeDream (Narayanan et al. 2019, SOSP, section 3.1) and DAPPLE solve for
stages, asked of the chunks of any schedule: it balances chunks, and does not see how the schedule waits.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baselines.incumbent import Incumbent
from baselines.planner import on_problems
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import TableResult
from darts_parallel.exact.segments import best_bottleneck, spans, split_below


def solve(
    tables: Sequence[CostTable], kind: str, *, deadline: float | None = None, seed: int = 0
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


def balanced(table: CostTable, outer: int, choice: int) -> HardPlans:
    """One plan whose longest chunk is as short as it can be."""
    seconds = table.time[outer, :, :, choice].detach().numpy()[table.stage_kind.numpy()]
    segments = spans(seconds)
    legal = np.triu(np.ones(segments.shape[1:], dtype=bool), 1)
    legal[:-1] &= ~table.fused_to_previous.numpy()[:, None]
    segments = np.where(legal, segments, np.inf)
    _, starts = split_below(segments, best_bottleneck(segments))
    choices = torch.full((1, table.num_layers), choice)
    return HardPlans(torch.tensor([outer]), choices, torch.tensor([starts]))
