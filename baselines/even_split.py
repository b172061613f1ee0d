"""Even splits: every schedule, number of chunks and strategy for all layers, stages as even as they can be.

What Megatron-LM and torchtitan do where the user gives no layout (Narayanan et al. 2021, arXiv 2104.04473).
"""

from baselines._planner import Incumbent, on_tables
from darts_parallel.cost import even_uniform_plans


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer the even splits of every table."""
    for number, table in enumerate(incumbent.tables):
        if incumbent.over():
            break
        incumbent.offer(number, even_uniform_plans(table))


solve = on_tables(offer_plans, closed_form=False, chunks=True)
