"""Equal names for equal things: strategies that change nothing for a layer follow the other layers."""

from collections import Counter

import torch

from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.table import CostTable


def canonical(table: CostTable, plan: HardPlans) -> HardPlans:
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


def without_dominated(table: CostTable) -> CostTable:
    """The table without strategies that another one beats or equals in everything.

    A strategy is dominated where one of the same layout needs no more seconds and no more bytes, for
    every layer, stage and outer choice; of equal ones the first is kept. No optimum is lost: the
    other can take its place in any plan of any space. Synchronisation may be longer by what the
    micro-batch is shorter (a shorter backward hides less of it): the sum over stages loses the one,
    the largest synchronisation gains at most the other.
    """
    if table.pipeline.simulated or table.virtual_stages > 1:
        # a longest path falls with each pass by itself
        seconds = [table.forward, table.backward - table.weight_gradient, table.weight_gradient, table.sync]
    else:
        seconds = [table.time, table.time + table.sync]
    figures = [*seconds, table.once, table.static, table.activation, table.working]
    rows = torch.cat([values.flatten(0, -2) for values in figures])
    no_worse = (rows.unsqueeze(1) <= rows.unsqueeze(2)).all(0)  # [a, b]: b is no worse than a
    legal = (table.allowed.unsqueeze(2) <= table.allowed.unsqueeze(1)).all(0)
    if table.kind_allowed is not None:
        legal &= (table.kind_allowed.unsqueeze(2) <= table.kind_allowed.unsqueeze(1)).all(0)
    same = table.layout.unsqueeze(0) == table.layout.unsqueeze(1)
    beats = no_worse & legal & same
    first = torch.arange(len(rows[0]))
    earlier = first.unsqueeze(0) < first.unsqueeze(1)
    dominated = (beats & (~beats.T | earlier)).any(1)
    return table.keep_choices(torch.nonzero(~dominated).squeeze(1))
