"""Choose, among stage splits of equal cost, the one whose stages differ least.

Where one stage is slowest, the others may often give and take layers without changing the iteration
time. A search then returns any of these splits; an engineer expects the most balanced one.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from darts_parallel.cost import evaluate_batch, hard_plan
from darts_parallel.exact import ChosenStages, DeadlineError
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

TOLERANCE = 1e-12
"""Relative; iteration times that differ by less are equal but for rounding."""
SUM_WEIGHT = 1e5
"""How much more a second of the stages' sum counts than a squared second, by the slowest stage."""


def balance_stages(plan: Plan, problem: Problem, tolerance: float = TOLERANCE) -> Plan:
    """Cut the layers of a plan again: the same iteration time, and stages whose seconds differ least.

    Every layer keeps its strategy. Among the splits whose slowest stage is at most the plan's, the sum of
    stage seconds comes first, then the sum of their squares; a dynamic program over stages and layers.

    Args:
        plan: Legal for the problem; it must fit.
        problem: Priced by the closed form, without interleaving or offloading; of others the plan is
            returned as it is.
        tolerance: Relative seconds that it may cost.

    Returns:
        The plan itself where no split is more even or the new one would be slower.
    """
    config = problem.config
    same = config.space.kind != "stagewise" or len(set(plan.layers)) == 1
    closed = config.cost.pipeline == "closed_form"
    if plan.pp == 1 or plan.virtual_stages > 1 or plan.offload or not same or not closed:
        return plan
    table, hard, cost = hard_plan(plan, problem)
    try:
        stages, seconds = ChosenStages.of(table, hard).fitting()
    except DeadlineError:  # too many layers to cut
        return plan
    slowest = float(cost.stage_seconds.max())
    fast = seconds <= slowest * (1 + tolerance)
    starts = stages.keep(fast).split_below(_spread(seconds[fast], slowest), np.inf)[1]
    if not starts:
        return plan
    new = evaluate_batch(table, replace(hard, first_layers=torch.tensor([starts])))
    before, after = float(cost.iteration_time[0]), float(new.iteration_time[0])
    squares = [float(c.stage_seconds.square().sum()) for c in (cost, new)]
    if (
        not bool(new.feasible[0])
        or after > before * (1 + tolerance)
        or squares[1] >= squares[0] * (1 - 1e-9)
    ):
        return plan
    return replace(plan, boundaries=(*starts, len(plan.layers)))


def _spread(seconds: NDArray[np.float64], slowest: float) -> NDArray[np.float64]:
    """Return what the program sums: squared seconds, and with far more weight the seconds themselves."""
    share = seconds / slowest
    return np.asarray(share * share + SUM_WEIGHT * share)
