"""HetPipe (Park et al., USENIX ATC 2020): pipelines over mixed GPUs, replicated as virtual workers.

Sections 4 and 6: a virtual worker is a pipeline of GPUs, possibly of different kinds, each of which runs one
partition of the layers; partitions are chosen so that the slowest is as fast as memory allows, knowing each
GPU's speed and memory; the number of micro-batches in flight is what fits; virtual workers train
data-parallel through a parameter server that hides synchronisation, so that throughput, not the latency
of an iteration, is the objective. Restricted to our plans: training is synchronous, all virtual workers cut
the layers alike, and stage k of each has the same kind of GPU (the paper's equal distribution). On a
cluster of one kind this is PipeDream's plan chosen by throughput. No tensor parallelism, no recomputation.
"""

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import outer_choices, plain
from darts_parallel.exact import ChosenStages


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the plan of the highest throughput."""
    ranked = []
    for outer in outer_choices(incumbent):
        for choice in plain(outer.strategies)[:1]:
            segments, seconds = ChosenStages.uniform(outer.costs, choice).fitting()
            starts = segments.even_split(seconds)
            if starts:
                rows = segments.rows_of(starts)
                slowest = float(seconds[rows].max())
                busy = outer.costs.num_micro_batches * slowest
                plan = outer.uniform(starts, choice)
                ranked.append((busy, outer.table, plan))
    best = sorted(ranked, key=lambda entry: entry[0])[:1]
    for _, table, plan in best:
        incumbent.offer(table, plan)


solve = on_tables(offer_plans, keep_all=True)
