"""Mist (Zhu et al., EuroSys 2025): Pareto samples of every stage, and a programme over the stages.

Section 5: inside a stage all layers share degrees and ZeRO stage, and as many of them are recomputed as
memory demands. A stage has two costs: seconds of a micro-batch `t`, and seconds `d` that are paid once an
iteration (synchronisation). Its undominated pairs are the samples of the stage. The programme between
stages chooses layers and a sample for each, so that `sum t + (micro-batches - 1) * max t + max d` is least.

Restricted to our plans: stages have equally many devices, there is no offloading inside the programme, and
the largest `d` counts whole, as in our closed form; Mist subtracts what early stages wait for anyway. Mist
gives the programme to a mixed-integer solver. Here limits on `d` fall as long as that may help, and the
stages below each limit are split by dynamic programming, which solves the same programme.
"""

from dataclasses import replace

import numpy as np

from baselines._planner import Incumbent, on_tables
from baselines._recomputation import Recomputation
from baselines._stage_costs import OuterChoice, cheapest_split, promising
from darts_parallel.config import RECOMPUTE


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the plan of every configuration that may beat the best, the most promising first."""
    for outer in promising(incumbent):
        _plan(outer, incumbent)


solve = on_tables(offer_plans, keep_all=True)


def samples(outer: OuterChoice) -> list[Recomputation]:
    """Return how stages may run: every strategy, with the least and the most recomputation it has."""
    pairs: dict[object, list[int]] = {}
    for kind in RECOMPUTE:
        for choice, strategy in enumerate(outer.strategies):
            if strategy.recompute == kind:
                pairs.setdefault(replace(strategy, recompute="none"), []).append(choice)
    found = []
    for own in pairs.values():
        found.append(Recomputation(outer, own[0], own[-1]))
    return found


def _plan(outer: OuterChoice, incumbent: Incumbent) -> None:
    """Solve the programme between stages, from no limit on what is paid once to ever lower ones."""
    options = samples(outer)
    segments = options[0].segments
    count = outer.costs.num_micro_batches
    seconds = np.stack([option.seconds for option in options])
    once = np.stack([option.stages.sync() for option in options])
    for option, row in zip(options, seconds, strict=True):
        per_iteration = outer.costs.per_iteration[None, :, option.keep]
        row += segments.sums(per_iteration, np.zeros(outer.costs.pp, dtype=np.int64)) / count
    possible = np.where(np.isfinite(seconds), once, np.inf)
    least = segments.least_maximum(possible.min(axis=0))
    limit = np.inf
    best = np.inf
    while not incumbent.over():
        allowed = np.where(once <= limit, seconds, np.inf)
        split = cheapest_split(segments, allowed.min(axis=0), outer.rest)
        if split is None or split[0] + least >= best:
            return
        rows = segments.rows_of(split[1])
        chosen = allowed[:, rows].argmin(axis=0)
        paid = float(once[chosen, rows].max())
        best = min(best, split[0] + paid)
        choices = []
        for sample, row in zip(chosen.tolist(), rows.tolist(), strict=True):
            choices += options[sample].strategies(row)
        incumbent.offer(outer.table, outer.plans(split[1], choices))
        limit = float(np.nextafter(paid, -np.inf))
