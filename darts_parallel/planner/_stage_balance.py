"""Choose, among stage splits of equal cost, the one whose stages differ least.

Where one stage is slowest, the others may often give and take layers without changing the iteration
time. A search then returns any of these splits; an engineer expects the most balanced one.
"""

from dataclasses import replace

import numpy as np
import torch

from darts_parallel.cost import (
    COST_TOLERANCE,
    GAIN_TOLERANCE,
    Array,
    BatchCost,
    evaluate_batch,
    hard_plan,
)
from darts_parallel.exact import ChosenStages, DeadlineError
from darts_parallel.planner._session import Asked
from darts_parallel.plans import Plan

SUM_WEIGHT = 1e5
"""How much more a second of the stages' sum counts than a squared second, by the slowest stage."""


def balance_stages(plan: Plan, asked: Asked, tolerance: float = GAIN_TOLERANCE) -> Plan:
    """Cut the layers of a plan again: the same iteration time, and stages whose seconds differ least.

    Every layer keeps its strategy. Among the splits whose slowest stage is at most the plan's, the
    sum of stage seconds comes first, then the sum of their squares; a dynamic program over stages
    and layers.

    Args:
        plan: Legal for the job; it must fit.
        asked: Priced by the closed form, without interleaving or offloading; otherwise the plan is
            returned as it is.
        tolerance: Relative seconds that it may cost.

    Returns:
        The plan itself where no split is more even or the new one would be slower.
    """
    if not _movable(plan, asked):
        return plan
    table, hard, cost = hard_plan(plan, asked.problem)
    try:
        stages, seconds = ChosenStages.of(table, hard).fitting()
    except DeadlineError:  # too many layers to cut
        return plan
    slowest = float(cost.stage_seconds.max())
    fast = seconds <= slowest * (1 + tolerance)
    unevenness = _unevenness(seconds[fast], slowest)
    _, starts = stages.keep(fast).split_below(unevenness, np.inf)
    if not starts:
        return plan
    hard = replace(hard, first_layers=torch.tensor([starts]))
    new = evaluate_batch(table, hard)
    limit = float(cost.iteration_time[0]) * (1 + tolerance)
    as_fast = float(new.fitting_seconds[0]) <= limit
    more_even = _squares(new) < _squares(cost) * (1 - COST_TOLERANCE)
    if not as_fast or not more_even:
        return plan
    return replace(plan, boundaries=(*starts, len(plan.layers)))


def _squares(cost: BatchCost) -> float:
    """Return the sum of squared seconds of the stages of one plan."""
    return float(cost.stage_seconds.square().sum())


def _movable(plan: Plan, asked: Asked) -> bool:
    """Return whether layers may change stages, and the closed form says what that costs."""
    if asked.simulated or plan.offload:
        return False
    if plan.pp == 1 or plan.virtual_stages > 1:
        return False
    return asked.space_kind != "stagewise" or len(set(plan.layers)) == 1


def _unevenness(seconds: Array, slowest: float) -> Array:
    """Return the terms of the program's sum: squared seconds, and with far more weight the seconds."""
    share = seconds / slowest
    return share * share + SUM_WEIGHT * share
