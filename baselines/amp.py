"""AMP (Li et al., NeurIPS 2022): every uniform configuration, its layers split by a dynamic program.

Section 3: candidates are all degrees (dp, tp, pp) and micro-batch sizes; for each, layers are assigned to
stages by a dynamic program on `sum + (micro-batches - 1) * max` of the stages' seconds; the cost model ranks
them, and the best that runs is taken. Memory is not part of the model: a candidate that does not fit is
found out when it is run, here when it is evaluated. Placement: our ranks are in node order, which is AMP's
choice on nodes of one kind. No ZeRO; recomputation is a candidate, as in the Megatron-LM that AMP runs.
"""

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import cheapest_split, outer_choices, plain
from darts_parallel.config import RECOMPUTE
from darts_parallel.exact import ChosenStages


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the best-ranked plan, then the next, until one runs."""
    ranked = []
    for outer in outer_choices(incumbent):
        for choice in plain(outer.strategies, recompute=RECOMPUTE):
            stages = ChosenStages.uniform(outer.costs, choice)
            split = cheapest_split(stages.segments, stages.seconds(), outer.rest)
            if split is not None:
                seconds, starts = split
                rows = stages.segments.rows_of(starts)
                seconds += float(stages.sync()[rows].max())
                seconds += float(outer.costs.per_iteration[:, choice].sum())
                ranked.append((seconds, outer.table, outer.uniform(starts, choice)))
    for _, table, plan in sorted(ranked, key=lambda entry: entry[0]):
        incumbent.offer(table, plan)
        if incumbent.best is not None:
            break


solve = on_tables(offer_plans, keep_all=True)
