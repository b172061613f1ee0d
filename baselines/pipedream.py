"""PipeDream (Narayanan et al., SOSP 2019): pipeline and data parallelism that balance the slowest stage.

Section 3.1: a dynamic program over layers and workers minimises the time of the slowest stage, its
computation and communication with the synchronisation of its replicas. Restricted to our plans: stages
are equally replicated (the paper's may differ), and training is synchronous (1F1B with a flush), so that
there is one version of the weights and the pipeline fills once an iteration: the program does not see
that. No tensor parallelism, no recomputation, no ZeRO where the space leaves that free.
"""

import numpy as np

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import outer_choices, plain
from darts_parallel.exact import ChosenStages


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the split of the fastest slowest stage of every configuration."""
    for outer in outer_choices(incumbent):
        for choice in plain(outer.strategies)[:1]:  # the smallest tensor-parallel degree
            stages = ChosenStages.uniform(outer.costs, choice)
            load = stages.seconds() + stages.sync() / outer.costs.num_micro_batches
            load = np.where(stages.fits(), load, np.inf)
            starts = stages.segments.even_split(load)
            if starts:
                incumbent.offer(outer.table, outer.uniform(starts, choice))


solve = on_tables(offer_plans, keep_all=True)
