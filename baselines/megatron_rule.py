"""The rule of thumb of Megatron-LM's users (Narayanan et al., SC 2021, sections 3 and 5, takeaways 1 to 3).

Tensor parallelism up to the GPUs of a node, then the fewest pipeline stages with which the model fits, and
data parallelism with the rest; layers are dealt out evenly, all with one strategy. The micro-batch size and
whether to recompute activations are then the best by the cost model (the paper tunes both by its equation 1).
No ZeRO and no sequence parallelism where the space leaves that free: they came later.
"""

from dataclasses import replace

import torch

from baselines.incumbent import Incumbent
from baselines.planner import on_problems, on_tables
from baselines.stage_costs import plain, plain_tables
from darts_parallel.config.schema import RECOMPUTE
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.exact.result import Verification
from darts_parallel.problem.problem import Problem


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
                wanted = [c for c in plain(table.choices, recompute=RECOMPUTE) if table.choices[c].tp == tp]
                plans = even_uniform_plans(table)
                mine = torch.isin(plans.choices[:, 0], torch.tensor(wanted, dtype=torch.long))
                if mine.any():
                    incumbent.offer(number, plans[mine])
            if incumbent.best is not None:
                return


solve = on_tables(offer_plans, keep_all=True)


def find_plan(problem: Problem, *, budget: float | None = None, seed: int = 0) -> Verification:
    """Answer a problem with tensor parallelism inside the nodes, where the space leaves it free.

    Args:
        problem: Model, cluster, job and space.
        budget: Seconds of wall-clock; None: as long as it takes.
        seed: Ignored, nothing is random.
    """
    gpus = min(group.gpus for group in problem.cluster.groups)
    space = problem.config.space
    if space.tp is None:
        space = replace(space, tp=[tp for tp in range(1, gpus + 1) if gpus % tp == 0])
    inside = replace(problem, config=replace(problem.config, space=space))
    return on_problems(solve)(inside, budget=budget, seed=seed)
