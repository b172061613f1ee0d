"""Which outer choices of simulated pipelines a search looks at, where there are too many to simulate.

A simulation goes through every pass of every micro-batch on every device: with all schedules free, Llama
3 405B on 1,024 GPUs has 426 outer choices and a hundred million passes. What needs no simulation ranks them:
the work of their even plans, lengthened by the filling of the pipeline and by the memory that they lack. Of
those a descent relaxes as many as its steps have time for, by the fastest plans that are known by then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from darts_parallel.cost import CostTable, PricedPlan, even_uniform_plans, table_reading
from darts_parallel.gradient.screening import num_passes, work_seconds

PASSES = 2**20
"""Passes of all outer choices that are looked at: what a search simulates in some seconds."""
WEIGHTS = 2**21
"""Weights of all relaxed plans of simulated pipelines: a step reads as many in a quarter of a second."""


def promising_outers(tables: Sequence[CostTable], passes: int = PASSES) -> Sequence[CostTable]:
    """Leave out the outer choices that a search does not look at; all that are not simulated stay.

    Args:
        passes: Of the simulated outer choices together, most promising first; one alone may have more.

    Returns:
        The tables of the others; `tables` as they are where none is left out.
    """
    ranked = [
        (seconds, number, outer, own)
        for number, table in enumerate(tables)
        if table.pipeline.simulated
        for outer, (seconds, own) in enumerate(
            zip(_promised_seconds(table).tolist(), num_passes(table).tolist(), strict=True)
        )
    ]
    out = _too_much(ranked, passes)
    if not out:
        return tables
    kept = [[o for o in range(t.num_outer) if (n, o) not in out] for n, t in enumerate(tables)]
    return [table.select(outers) for table, outers in zip(tables, kept, strict=True) if outers]


def relaxed_outers(
    tables: Sequence[CostTable], known: Sequence[PricedPlan], restarts: int
) -> list[Tensor]:
    """Choose the outer choices to relax: of simulated pipelines those of the fastest known plans.

    Args:
        known: The fastest known plan of every outer choice that has one.

    Returns:
        For each table whether an outer choice is relaxed, bool `(O,)`; all that are not simulated are.
    """
    seconds = {entry.outer: entry.time for entry in known}
    ranked = [
        (seconds.get((number, outer), torch.inf), number, outer, restarts * _weights(table))
        for number, table in enumerate(tables)
        if table.pipeline.simulated
        for outer in range(table.num_outer)
    ]
    relaxed = [torch.ones(table.num_outer, dtype=torch.bool) for table in tables]
    for number, outer in _too_much(ranked, WEIGHTS):
        relaxed[number][outer] = False
    return relaxed


def _weights(table: CostTable) -> int:
    """Return weights of the strategies and of the stages of one relaxed plan."""
    return table.num_layers * (len(table.choices) + table.num_stages)


def _too_much(ranked: Sequence[tuple[float, int, int, int]], most: int) -> set[tuple[int, int]]:
    """Return tables and outer choices that `most` work has no room for.

    Args:
        ranked: Seconds, table, outer choice and work of each; the fastest come first, and one at least stays.
        most: Work of all that stay.
    """
    left, out = most, set()
    for _, number, outer, own in sorted(ranked):
        if own > left and left < most:
            out.add((number, outer))
        else:
            left -= own
    return out


def _promised_seconds(table: CostTable) -> Tensor:
    """Estimate the seconds of every outer choice's fastest even plan, `(O,)`; infinite without any."""
    plans = even_uniform_plans(table)
    reading = table_reading(table, plans)
    lacking = (reading.memory / table.capacity).amax(1).clamp(min=1.0)
    count = table.num_micro_batches[plans.outer]
    filling = 1.0 + (table.pp - 1) / (count * table.virtual_stages)
    seconds = work_seconds(table, plans, reading) * lacking * filling
    result = torch.full((table.num_outer,), torch.inf, dtype=torch.float64)
    return result.scatter_reduce(0, plans.outer, seconds, "amin")
