"""Every plan of a tiny space, priced one by one: the referee of the other exact planners."""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, product

import numpy as np
import torch

from darts_parallel.cost import CostTable, HardPlans, PricedPlan, evaluate_batch
from darts_parallel.exact.result import TableResult

BATCH = 1 << 14
"""Plans that are priced at once."""
MAX_PLANS = 50_000_000
"""Plans that are still called tiny."""


def brute_force(tables: Sequence[CostTable], space_kind: str) -> TableResult:
    """Return the cheapest feasible plan of all tables and outer choices.

    Args:
        tables: One for each pipeline degree; tiny.
        space_kind: `uniform`, `stagewise` or `layerwise`.

    Errors:
        ValueError: there are more than `MAX_PLANS` plans.
    """
    best: PricedPlan | None = None
    count = 0
    for number, table in enumerate(tables):
        for plans in _all_plans(table, space_kind):
            count += len(plans)
            if count > MAX_PLANS:
                raise ValueError(f"brute force: the {space_kind} space has more than {MAX_PLANS} plans.")
            cost = evaluate_batch(table, plans)
            total = torch.where(cost.feasible, cost.iteration_time, torch.inf)
            row = int(total.argmin())
            if total[row] < (float("inf") if best is None else best.time):
                best = PricedPlan(number, plans[torch.tensor([row])], float(total[row]))
    return TableResult(best, float("inf") if best is None else best.time, True, count)


def _all_plans(table: CostTable, space_kind: str) -> Iterator[HardPlans]:
    """Return all plans of a table in batches: outer choices x splits x strategies."""
    layers = range(1, table.num_layers)
    for starts in combinations(
        [x for x in layers if not bool(table.fused_to_previous[x])], table.num_stages - 1
    ):
        split = torch.tensor([0, *starts])
        widths = torch.diff(split, append=torch.tensor([table.num_layers]))
        for outer in range(table.num_outer):
            for block in _assignments(table, outer, space_kind):
                if space_kind == "stagewise":
                    choices = block.repeat_interleave(widths, dim=1)
                else:
                    choices = block.expand(-1, table.num_layers)
                size = len(choices)
                yield HardPlans(torch.full((size,), outer), choices, split.expand(size, -1))


def _assignments(table: CostTable, outer: int, space_kind: str) -> Iterator[torch.Tensor]:
    """Return allowed strategies of the model, of every stage or of every layer: `(n, 1 | K | L)`."""
    allowed = np.flatnonzero(table.allowed[outer].numpy()).tolist()
    slots = {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]
    every = product(allowed, repeat=slots)
    while block := list(islice(every, BATCH)):
        yield torch.tensor(block)
