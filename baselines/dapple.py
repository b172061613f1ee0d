"""DAPPLE (Fan et al., PPoPP 2021): synchronous pipeline and data parallelism planned for latency.

Section 4: the planner minimises the pipeline's latency, warm-up, steady phase around the slowest (pivot)
stage, and ending with the gradients' all-reduce, over partitions of the layers, by dynamic programming. In
our plans that is `sum + (micro-batches - 1) * max + synchronisation`. Recomputation may be switched on.
Restricted to our plans: stages are equally replicated, devices are placed in node order. No tensor
parallelism and no ZeRO where the space leaves that free.
"""

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import cheapest_split, outer_choices, plain
from darts_parallel.config import RECOMPUTE
from darts_parallel.exact import ChosenStages


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the split of least latency of every configuration and kind of recomputation."""
    for outer in outer_choices(incumbent):
        candidates = plain(outer.strategies, recompute=RECOMPUTE)
        smallest = min((outer.strategies[c].tp for c in candidates), default=1)
        for choice in candidates:
            if outer.strategies[choice].tp > smallest:
                continue
            segments, seconds = ChosenStages.uniform(outer.costs, choice).fitting()
            split = cheapest_split(segments, seconds, outer.rest)
            if split is not None:
                incumbent.offer(outer.table, outer.uniform(split[1], choice))


solve = on_tables(offer_plans, keep_all=True)
