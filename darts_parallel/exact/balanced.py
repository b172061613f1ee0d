"""Chunks of least maximum: one strategy for all layers, the longest chunk as short as it can be.

The linear partition problem that PipeDream (Narayanan et al. 2019, SOSP, section 3.1) and DAPPLE solve for
stages, asked of the chunks of any schedule: it balances chunks, and does not see how the schedule waits.
"""

from collections.abc import Iterable

import numpy as np
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, even_uniform_plans
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.segments import best_bottleneck, spans, split_below


def balanced(table: CostTable, outer: int, choice: int) -> HardPlans:
    """One plan whose longest chunk is as short as it can be."""
    seconds = table.time[outer, :, :, choice].detach().numpy()
    segments = spans(seconds)
    legal = np.triu(np.ones(segments.shape[1:], dtype=bool), 1)
    legal[:-1] &= ~table.fused_to_previous.numpy()[:, None]
    segments = np.where(legal, segments, np.inf)[table.stage_kind.numpy()]
    _, starts = split_below(segments, best_bottleneck(segments))
    choices = torch.full((1, table.num_layers), choice)
    return HardPlans(torch.tensor([outer]), choices, torch.tensor([starts]))


def balanced_plans(table: CostTable, outers: Iterable[int], count: int = 2) -> HardPlans | None:
    """Balanced plans of the strategies that do best on even chunks.

    Args:
        table: Costs.
        outers: Outer choices that count.
        count: Strategies of each outer choice: the fastest that fit; where none does, the fastest, whose
            plan may be repaired, and the lightest.

    Returns:
        At most `count` plans for each outer choice; None without any.
    """
    even, found = even_uniform_plans(table), []
    cost = evaluate_batch(table, even)
    peak = (cost.memory / table.capacity).amax(1)
    # every plan that fits comes before every one that does not
    rank = torch.where(cost.feasible, cost.iteration_time / cost.iteration_time.max(), 1.0 + peak)
    for outer in outers:
        mine = torch.nonzero(even.outer == outer).squeeze(1)
        best = mine[rank[mine].argsort(stable=True)[:count]].tolist()
        if not bool(cost.feasible[mine].any()):
            best = [int(mine[cost.iteration_time[mine].argmin()]), *best[: count - 1]]
        found += [balanced(table, outer, int(even.choices[row, 0])) for row in best]
    return HardPlans.concatenate(found) if found else None
