"""PipeDream (Narayanan et al., SOSP 2019): pipeline and data parallelism that balance the slowest stage.

Section 3.1: a dynamic program over layers and workers minimises the time of the slowest stage, its
computation and communication with the synchronisation of its replicas. Restricted to our plans: stages
are equally replicated (the paper's may differ), and training is synchronous (1F1B with a flush), so that
there is one version of the weights and the pipeline fills once an iteration: the program does not see
that. No tensor parallelism, no recomputation, no ZeRO where the space leaves that free.
"""

from collections.abc import Sequence

import numpy as np

from baselines.incumbent import Incumbent
from baselines.planner import on_problems
from baselines.stage_costs import bottleneck_split, outer_choices, plain
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.chosen_stages import ChosenStages
from darts_parallel.exact.result import TableResult


def solve(
    tables: Sequence[CostTable], space_kind: str, *, deadline: float | None = None, seed: int = 0
) -> TableResult:
    """Search cost tables; arguments as `random_search.solve`."""
    incumbent = Incumbent(tables, deadline, keep_all=True)
    for outer in outer_choices(incumbent):
        choice = plain(outer.strategies)[:1]  # the smallest tensor-parallel degree
        for c in choice:
            stages = ChosenStages.uniform(outer.costs, c)
            load = stages.seconds() + stages.sync() / outer.costs.num_micro_batches
            starts = bottleneck_split(stages.segments, np.where(stages.fits(), load, np.inf))
            if starts is not None:
                incumbent.offer(outer.table, outer.uniform(starts, c))
    return incumbent.result()


find_plan = on_problems(solve)
