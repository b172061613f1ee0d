"""Which outer choices of simulated pipelines a search looks at, where there are too many to simulate.

A simulation goes through every pass of every micro-batch on every device: with all schedules free, Llama
3 405B on 1,024 GPUs has 426 outer choices and a hundred million passes. What needs no simulation ranks them:
the work of their even plans, lengthened by the filling of the pipeline and by the memory that they lack.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from darts_parallel.cost.evaluation import table_reading
from darts_parallel.cost.hard_plans import even_uniform_plans
from darts_parallel.cost.schedules import SPLIT_BACKWARD
from darts_parallel.cost.table import CostTable
from darts_parallel.gradient.screening import work_seconds

PASSES = 2**20
"""Passes of all outer choices that are looked at: what a search simulates in some seconds."""


def promising_outers(tables: Sequence[CostTable], passes: int = PASSES) -> Sequence[CostTable]:
    """Leave out the outer choices that a search does not look at; all that are not simulated stay.

    Args:
        tables: One for each pipeline degree, number of chunks and schedule.
        passes: Of the simulated outer choices together, most promising first; one alone may have more.

    Returns:
        The tables of the others; `tables` as they are where none is left out.
    """
    ranked = [
        (seconds, number, outer, _passes(table, outer))
        for number, table in enumerate(tables)
        if table.pipeline.simulated
        for outer, seconds in enumerate(_promised_seconds(table).tolist())
    ]
    left, out = passes, set()
    for _, number, outer, own in sorted(ranked):
        if own > left and left < passes:
            out.add((number, outer))
        else:
            left -= own
    if not out:
        return tables
    kept = [[o for o in range(t.num_outer) if (n, o) not in out] for n, t in enumerate(tables)]
    return [table.select(outers) for table, outers in zip(tables, kept, strict=True) if outers]


def _promised_seconds(table: CostTable) -> Tensor:
    """What the fastest even plan of every outer choice may take, `(O,)`; infinite without any."""
    plans = even_uniform_plans(table)
    reading = table_reading(table, plans)
    lacking = (reading.memory / table.capacity).amax(1).clamp(min=1.0)
    count = table.num_micro_batches[plans.outer]
    filling = 1.0 + (table.pp - 1) / (count * table.virtual_stages)
    seconds = work_seconds(table, plans, reading) * lacking * filling
    result = torch.full((table.num_outer,), torch.inf, dtype=torch.float64)
    return result.scatter_reduce(0, plans.outer, seconds, "amin")


def _passes(table: CostTable, outer: int) -> int:
    kinds = 3 if table.pipeline.schedule in SPLIT_BACKWARD else 2
    return kinds * table.num_stages * int(table.num_micro_batches[outer])
