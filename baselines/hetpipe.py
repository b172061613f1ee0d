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
from baselines._stage_costs import OuterChoice, bottleneck_split, outer_choices, plain
from darts_parallel.exact import ChosenStages


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer the plan of the highest throughput."""
    ranked: list[tuple[float, int, OuterChoice, int, list[int]]] = []
    for outer in outer_choices(incumbent):
        for choice in plain(outer.strategies)[:1]:
            segments, seconds = ChosenStages.uniform(outer.costs, choice).fitting()
            starts = bottleneck_split(segments, seconds)
            if starts is not None:
                busy = outer.costs.num_micro_batches * float(
                    seconds[segments.rows_of(starts)].max()
                )
                ranked.append((busy, len(ranked), outer, choice, starts))
    for _, _, outer, choice, starts in sorted(ranked, key=lambda entry: entry[:2])[:1]:
        incumbent.offer(outer.table, outer.uniform(starts, choice))


solve = on_tables(offer_plans, keep_all=True)
