"""Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): tensor, data and pipeline parallelism by stage.

Sections 4 and 5: a dynamic program over the layers chooses stages, each with its own tensor-parallel degree
and, under the memory limit, recomputation layer by layer; the slowest stage is minimised. What to
recompute in a stage is a knapsack, which a heuristic solves as in the paper: the most bytes per second first.
Restricted to our plans: stages have equally many devices. No ZeRO, no sequence parallelism where the space
leaves that free.
"""

import numpy as np

from baselines._planner import Incumbent, on_tables
from baselines._recomputation import Recomputation
from baselines._stage_costs import OuterChoice, outer_choices, plain
from darts_parallel.cost import Array


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the best stages of every configuration."""
    for outer in outer_choices(incumbent):
        count = outer.costs.num_micro_batches
        degrees = sorted({strategy.tp for strategy in outer.strategies})
        options = [_of_degree(outer, tp) for tp in degrees]
        segments = options[0].segments
        loads = np.stack([_load(option, count) for option in options])
        starts = segments.even_split(loads.min(axis=0))
        if not starts:
            continue
        choices = []
        for row in segments.rows_of(starts).tolist():
            fastest = options[int(loads[:, row].argmin())]
            choices += fastest.strategies(row)
        incumbent.offer(outer.table, outer.plans(starts, choices))


solve = on_tables(offer_plans, keep_all=True)


def _load(option: Recomputation, count: int) -> Array:
    """Return the seconds of all stages, with a share of their synchronisation for each micro-batch."""
    once = option.stages.sync()
    return option.seconds + once / count


def _of_degree(outer: OuterChoice, tp: int) -> Recomputation:
    """Choose the strategies of a degree; without recomputation, or nothing else, both are the same."""
    found = []
    for kind in ("none", "selective", "full"):
        every = plain(outer.strategies, recompute=(kind,))
        found += [c for c in every if outer.strategies[c].tp == tp][:1]
    return Recomputation(outer, found[0], found[-1])
