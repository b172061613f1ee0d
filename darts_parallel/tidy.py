"""Equal names for equal things: strategies that change nothing for a layer follow the other layers."""

from collections import Counter

import torch

from darts_parallel.cost import HardPlans
from darts_parallel.table import CostTable


def tidy(table: CostTable, plan: HardPlans) -> HardPlans:
    """The plan with every layer on the most common strategy that costs it exactly the same.

    Recomputation means nothing to an embedding, nor a ZeRO stage to the loss: a search leaves them at
    random. The true cost does not change.
    """
    outer, choices = int(plan.outer[0]), plan.choices[0].tolist()
    common = [choice for choice, _ in Counter(choices).most_common()]
    order = common + [c for c in range(len(table.choices)) if c not in common]
    same = _same_cost(table, outer)
    legal = table.allowed[outer]
    result = [next(c for c in order if legal[c] and same[layer, old, c]) for layer, old in enumerate(choices)]
    return HardPlans(plan.outer, torch.tensor([result]), plan.starts)


def _same_cost(table: CostTable, outer: int) -> torch.Tensor:
    """Pairs of strategies of one layout and equal costs, shape `(L, C, C)`."""
    kinds = [table.forward[outer], table.backward[outer], table.sync[outer]]
    bytes_and_once = [table.once[outer], table.static[outer], table.activation[outer], table.working[outer]]
    figures = torch.cat([torch.cat(kinds), torch.stack(bytes_and_once)])
    equal = (figures.unsqueeze(-1) == figures.unsqueeze(-2)).all(0)
    return equal & (table.layout.unsqueeze(0) == table.layout.unsqueeze(1))
