"""Random search: independent random plans, the best feasible one is kept (Bergstra and Bengio, JMLR 2012)."""

from collections.abc import Sequence

import torch

from baselines.chains import PlanSpace
from baselines.incumbent import Incumbent, time_limit
from baselines.moves import MoveWeights, RandomMoves
from baselines.planner import on_problems
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import TableResult

BATCH = 256
"""Plans priced at once."""


def solve(
    tables: Sequence[CostTable],
    space_kind: str,
    *,
    deadline: float | None = None,
    seed: int = 0,
    max_steps: int | None = None,
) -> TableResult:
    """Search cost tables.

    Args:
        tables: One for each pipeline degree.
        space_kind: `uniform`, `stagewise` or `layerwise`.
        deadline: `time.monotonic()` at which to stop.
        seed: Of all random numbers.
        max_steps: Batches after which to stop in any case.
    """
    incumbent = Incumbent(tables, time_limit(deadline))
    space = PlanSpace(incumbent, space_kind)
    moves = RandomMoves(space, MoveWeights(), torch.Generator().manual_seed(seed))
    space.price(space.starting_plans())
    step = 0
    while not incumbent.over() and (max_steps is None or step < max_steps):
        space.price(moves.random_plans(BATCH))
        step += 1
    return incumbent.result()


find_plan = on_problems(solve)
