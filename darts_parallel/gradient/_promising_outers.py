"""Select the pipeline configurations of simulated pipelines, where there are too many to simulate.

A simulation goes through every pass of every micro-batch on every device: with all schedules free,
Llama 3 405B on 1,024 GPUs has 426 configurations and a hundred million passes. So they are ranked
without a simulation: by the work of their even plans, lengthened by the filling of the pipeline and
by the memory that they lack. A descent relaxes as many as its steps have time for, ranked by the
fastest plans that are known by then.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from darts_parallel.cost import (
    CostTable,
    PricedPlan,
    Tables,
    even_uniform_plans,
    filled,
    flatnonzero,
    table_reading,
)
from darts_parallel.gradient.screening import num_passes, work_seconds

PASSES = 2**20
"""Passes of all selected configurations: a search simulates as many in some seconds."""
WEIGHTS = 2**21
"""Weights of all relaxed plans of simulated pipelines: a step takes a quarter of a second."""
PLAIN_WEIGHTS = 2**22
"""Weights of all other relaxed plans: with 1,000 layers a step takes a second."""


class _Ranked(NamedTuple):
    """A pipeline configuration; sorted by seconds, then by table and row."""

    seconds: float
    table: int
    outer: int
    work: int
    """Passes or weights."""


def promising_outers(tables: Tables, passes: int = PASSES) -> Tables:
    """Leave out unpromising configurations of simulated pipelines.

    Args:
        passes: Of the simulated configurations together, most promising first; one alone may have
            more.

    Returns:
        The tables of the others; `tables` as they are where none is left out.
    """
    ranked = []
    for number, table in enumerate(tables):
        if table.simulated:
            work = num_passes(table).tolist()
            for outer, seconds in enumerate(_promised_seconds(table).tolist()):
                ranked.append(_Ranked(seconds, number, outer, work[outer]))
    out = _beyond(ranked, passes)
    if not out:
        return tables
    remaining = []
    for number, table in enumerate(tables):
        outers = [outer for outer in range(table.num_outer) if (number, outer) not in out]
        if outers:
            remaining.append(table.select(outers))
    return remaining


def relaxed_outers(
    tables: Tables,
    known: Sequence[PricedPlan],
    restarts: int,
    possible: Sequence[Tensor],
) -> list[Tensor]:
    """Choose the configurations to relax: those of the fastest known plans, where there are too many.

    Args:
        known: The fastest known plan of every configuration that has one.
        possible: Whether a row may win, bool `(O,)` of each table.

    Returns:
        For each table whether a row is relaxed, bool `(O,)`.
    """
    seconds = {entry.outer: entry.time for entry in known}
    ranked: dict[bool, list[_Ranked]] = {True: [], False: []}
    for number, table in enumerate(tables):
        weights = restarts * table.num_layers * (len(table.choices) + table.num_stages)
        counted = possible[number] | table.simulated
        for outer in flatnonzero(counted).tolist():
            time = seconds.get((number, outer), torch.inf)
            ranked[table.simulated].append(_Ranked(time, number, outer, weights))
    relaxed = [rows.clone() for rows in possible]
    out = _beyond(ranked[True], WEIGHTS) | _beyond(ranked[False], PLAIN_WEIGHTS)
    for number, outer in out:
        relaxed[number][outer] = False
    return relaxed


def _beyond(ranked: Sequence[_Ranked], most: int) -> set[tuple[int, int]]:
    """Return table and row of the configurations beyond `most` work, fastest first; one stays."""
    left = most
    out = set()
    for entry in sorted(ranked):
        if entry.work > left and left < most:
            out.add((entry.table, entry.outer))
        else:
            left -= entry.work
    return out


def _promised_seconds(table: CostTable) -> Tensor:
    """Estimate the seconds of every row's fastest even plan, `(O,)`; infinite without any."""
    plans = even_uniform_plans(table)
    reading = table_reading(table, plans)
    share = (reading.memory / table.capacity).amax(1)
    lacking = share.clamp(min=1.0)
    passes = table.num_micro_batches[plans.outer] * table.virtual_stages
    filling = 1.0 + (table.pp - 1) / passes
    work = work_seconds(table, plans, reading)
    seconds = work * lacking * filling
    result = filled(torch.inf, table.num_outer)
    return result.scatter_reduce(0, plans.outer, seconds, "amin")
