"""Strategies that no plan needs, taken out of a cost table."""

import torch

from darts_parallel.table import CostTable


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
