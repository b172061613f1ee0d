"""Enumeration of every plan of a small space: the reference for all exact planners."""

from collections.abc import Iterator
from itertools import combinations, islice, product
from math import comb, inf

import torch
from torch import Tensor

from darts_parallel.cost import CostTable, HardPlans, PricedPlan, Tables, fastest, flatnonzero
from darts_parallel.exact.result import TableResult

BATCH_SIZE = 1 << 14
"""Plans that are priced at once; bounds the memory of `evaluate_batch`."""


def brute_force(tables: Tables, space_kind: str) -> TableResult:
    """Return the cheapest feasible plan of all tables and outer choices.

    Args:
        tables: One for each pipeline degree; tiny.
        space_kind: One of `config.schema.SPACES`.
    """
    best: PricedPlan | None = None
    least = inf
    count = 0
    for number, table in enumerate(tables):
        for plans in _all_plans(table, space_kind):
            count += len(plans)
            found = fastest(number, table, plans)
            if found.time < least:
                best = found
                least = found.time
    return TableResult(best, least, True, count)


def number_of_plans(tables: Tables, space_kind: str) -> int:
    """Count the plans of a space: splits times assignments of strategies."""
    total = 0
    for table in tables:
        splits = comb(len(_boundaries(table)), table.num_stages - 1)
        slots = number_of_slots(table, space_kind)
        assignments = sum(int(allowed.sum()) ** slots for allowed in table.allowed)
        total += splits * assignments
    return total


def number_of_slots(table: CostTable, space_kind: str) -> int:
    """Return the number of strategies that a plan chooses: of the model, its stages or its layers."""
    return {"uniform": 1, "stagewise": table.num_stages, "layerwise": table.num_layers}[space_kind]


def _boundaries(table: CostTable) -> list[int]:
    """Return the layers that may begin a stage after the first one."""
    return [layer for layer in range(1, table.num_layers) if not table.fused_to_previous[layer]]


def _all_plans(table: CostTable, space_kind: str) -> Iterator[HardPlans]:
    """Yield all plans of a table in batches: splits x outer choices x strategies."""
    for cuts in combinations(_boundaries(table), table.num_stages - 1):
        first_layers = torch.tensor([0, *cuts])
        sizes = torch.diff(first_layers, append=torch.tensor([table.num_layers]))
        for outer in range(table.num_outer):
            for choices in _assignments(table, outer, space_kind):
                if space_kind == "stagewise":
                    choices = choices.repeat_interleave(sizes, dim=1)
                count = len(choices)
                yield HardPlans(
                    torch.full((count,), outer),
                    choices.expand(-1, table.num_layers),
                    first_layers.expand(count, -1),
                )


def _assignments(table: CostTable, outer: int, space_kind: str) -> Iterator[Tensor]:
    """Yield allowed strategies of the model, of every stage or of every layer: `(n, slots)`."""
    allowed = flatnonzero(table.allowed[outer]).tolist()
    every = product(allowed, repeat=number_of_slots(table, space_kind))
    while batch := list(islice(every, BATCH_SIZE)):
        yield torch.tensor(batch)
