"""Exact stage edges for given strategies: the smallest `sum + (m - 1) max` of stage seconds that fits."""

from itertools import islice

import numpy as np
import torch

from darts_parallel.cost import CostTable, HardPlans
from darts_parallel.exact import ChosenStages, DeadlineError

LIMITS_ABOVE = 8
"""Limits above the smallest feasible one that are tried: a slower bottleneck may have a smaller sum."""


def repartitioned(table: CostTable, plan: HardPlans, most: int = LIMITS_ABOVE) -> HardPlans:
    """Cut the plan again: the best for its strategies under each of `most` limits of the stages.

    Synchronisation is left out of the program; the caller evaluates what comes back.
    """
    if table.pp == 1:
        return plan
    try:
        chosen = ChosenStages.of(table, plan)
    except DeadlineError:  # too many layers to cut
        return plan
    # all outer choices share the segments, and what they remember
    seconds = np.where(chosen.fits(), chosen.seconds(), np.inf)
    limits = list(islice(chosen.segments.rising_limits(seconds), most))
    if not limits:
        return plan
    starts = [starts for _, starts in chosen.segments.splits_below(seconds, limits)]
    count = len(starts)
    return HardPlans(plan.outer.expand(count), plan.choices.expand(count, -1), torch.tensor(starts))
