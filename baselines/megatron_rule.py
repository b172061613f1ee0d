"""The rule of thumb of Megatron-LM's users (Narayanan et al., SC 2021, sections 3 and 5, takeaways 1 to 3).

Tensor parallelism up to the GPUs of a node, then the fewest pipeline stages with which the model fits, and
data parallelism with the rest; layers are dealt out evenly, all with one strategy. The micro-batch size and
whether to recompute activations are then the best by the cost model (the paper tunes both by its equation 1).
No ZeRO and no sequence parallelism where the space leaves that free: they came later.
"""

import torch

from baselines._planner import Incumbent, on_tables
from baselines._stage_costs import plain, plain_tables
from darts_parallel.config import RECOMPUTE
from darts_parallel.cost import even_uniform_plans


def offer_plans(incumbent: Incumbent) -> None:
    """Offer the plans of the largest tp and the fewest stages that fit; a smaller tp only if nothing fits.

    Tables know no nodes: the largest tp among them counts as that of the node.
    """
    tables = incumbent.tables
    plainest = plain_tables(tables)
    degrees = set()
    for number in plainest:
        degrees |= {choice.tp for choice in tables[number].choices}
    for tp in sorted(degrees, reverse=True):
        for pp in sorted({tables[number].pp for number in plainest}):
            for number in plainest:
                if tables[number].pp == pp:
                    _offer_even(incumbent, number, tp)
            if incumbent.best is not None:
                return


def _offer_even(
    incumbent: Incumbent,
    number: int,
    tp: int,
) -> None:
    """Offer the plans of even stages and one strategy of tensor-parallel degree `tp`."""
    table = incumbent.tables[number]
    every = plain(table.choices, recompute=RECOMPUTE)
    wanted = [c for c in every if table.choices[c].tp == tp]
    plans = even_uniform_plans(table)
    of_degree = torch.tensor(wanted, dtype=torch.long)
    rows = torch.isin(plans.choices[:, 0], of_degree)
    if rows.any():
        incumbent.offer(number, plans[rows])


solve = on_tables(offer_plans, keep_all=True)
