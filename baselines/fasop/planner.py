"""FASOP's algorithm on the project's own problems: its enumeration and heuristic over our cost table.

What FASOP reads from measurements it reads here from the table, and its plans are scored by `evaluate` like
everybody's. It has no ZeRO, recomputation and the like: where the space has them they are enumerated with the
degrees, so that it is not judged by what it does not know.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baselines.fasop.costs import TICK
from baselines.fasop.minmax import first_partition, minmax_partition
from baselines.incumbent import Incumbent
from baselines.result import BaselineResult, TableResult, on_problem
from darts_parallel.cost import HardPlans
from darts_parallel.discretize import unit_starts
from darts_parallel.problem import Problem
from darts_parallel.table import CostTable


def find_plan(problem: Problem, *, budget: float | None = None, seed: int = 0) -> BaselineResult:
    """The best of FASOP's plans: one strategy for all layers, stages by its min-max heuristic.

    Args:
        problem: Model, cluster, job and space; orders of unequal nodes are those of
            `space.node_orders`, where `shifts` are FASOP's own.
        budget: Seconds of wall-clock; None: as long as it takes.
        seed: Ignored, nothing is random.
    """
    return on_problem(problem, lambda tables, kind, end: solve(tables, kind, deadline=end), budget)


def solve(
    tables: Sequence[CostTable], kind: str = "layerwise", *, deadline: float | None = None, seed: int = 0
) -> TableResult:
    """The same over cost tables, one for each pipeline degree.

    Args:
        tables: The tables.
        kind: Ignored, its plans are uniform and lie in every space.
        deadline: `time.monotonic()` at which to stop with what was found.
        seed: Ignored, nothing is random.
    """
    incumbent = Incumbent(tables, float("inf") if deadline is None else deadline)
    for index, table in enumerate(incumbent.tables):
        if incumbent.over():
            break
        incumbent.offer(index, fasop_plans(table))
    return incumbent.result()


def fasop_plans(table: CostTable) -> HardPlans:
    """Every outer choice with every strategy for all layers, partitioned by FASOP's heuristic.

    Its stage times are compute, collectives included, and for stages that are neither first nor last p2p.
    """
    outer, choice = torch.nonzero(table.allowed, as_tuple=True)
    units = unit_starts(table.joined)
    ends = torch.cat([units[1:], torch.tensor([table.num_layers])])
    # (B, kinds, layers), then the end of every unit of layers that cannot be parted
    seconds = table.time.detach()[outer, :, :, choice].cumsum(2)[:, :, ends - 1]
    kinds = seconds.shape[1]
    ticks = np.rint(seconds.numpy().reshape(-1, len(units)) / TICK).astype(np.int64)
    stage_type = np.arange(len(outer))[:, None] * kinds + table.stage_kind.numpy()
    comm = np.rint(_receive_seconds(table, outer, choice, units).numpy() / TICK).astype(np.int64)
    counts = minmax_partition(np.pad(ticks, ((0, 0), (1, 0))), stage_type, comm)[1]
    first = np.cumsum(counts, axis=1) - counts
    return HardPlans(outer, choice.unsqueeze(1).expand(-1, table.num_layers), units[torch.from_numpy(first)])


def _receive_seconds(
    table: CostTable, outer: torch.Tensor, choice: torch.Tensor, units: torch.Tensor
) -> torch.Tensor:
    """Seconds across the boundary before each middle stage, where even stages have it, `(B, K)`."""
    result = torch.zeros(len(outer), table.num_stages, dtype=torch.float64)
    if table.num_stages < 3:
        return result
    even = first_partition(len(units), table.num_stages).cumsum()[: table.num_stages - 2]
    pairs = units[torch.from_numpy(even)] - 1
    layout = table.layout[choice].unsqueeze(1)
    border = table.boundary_kind[: table.num_stages - 2].unsqueeze(0)
    result[:, 1:-1] = table.p2p.detach()[outer.unsqueeze(1), border, pairs.unsqueeze(0), layout, layout]
    return result
