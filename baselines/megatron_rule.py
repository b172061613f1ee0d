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


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer the plans of the largest tp and the fewest stages that fit; a smaller tp only if nothing fits.

    Tables know no nodes: the largest tp among them counts as that of the node.
    """
    tables = incumbent.tables
    plainest = plain_tables(tables)
    degrees = sorted({choice.tp for n in plainest for choice in tables[n].choices}, reverse=True)
    for tp in degrees:
        for pp in sorted({tables[n].pp for n in plainest}):
            for number in (n for n in plainest if tables[n].pp == pp):
                table = tables[number]
                wanted = [
                    c
                    for c in plain(table.choices, recompute=RECOMPUTE)
                    if table.choices[c].tp == tp
                ]
                plans = even_uniform_plans(table)
                mine = torch.isin(plans.choices[:, 0], torch.tensor(wanted, dtype=torch.long))
                if mine.any():
                    incumbent.offer(number, plans[mine])
            if incumbent.best is not None:
                return


solve = on_tables(offer_plans, keep_all=True)
