"""A new plan after nodes are lost or added, from the plan that ran.

The old plan is carried over to every outer choice of the new cluster: each layer takes the legal strategy
that differs least from its own, stages keep their shares of the layers. The outer choices where that is
fastest are searched by gradient from there, a few restarts and few steps, and polished. The global batch
stays.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import log2

import torch

from darts_parallel.cost import (
    CostTable,
    HardPlans,
    build_tables,
    even_uniform_plans,
    round_edges,
    unit_starts,
    without_dominated,
)
from darts_parallel.gradient import PlanPool, SearchResult, TablePlans, repartitioned, search, search_tables
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.problem import Problem

TABLES, PER_TABLE = 5, 4
"""Pipeline degrees and node orders that are searched further, and numbers of micro-batches of each."""
WARM_STEPS, WARM_RESTARTS = 30, 4
"""Steps and restarts of the warm search."""
WARM_POLISHED = 4
"""Plans that are polished by cheap moves; the best of them by all but the most expensive."""
WARM_TEMPERATURE = 0.5
"""First temperature: the old plan is a strong hint."""


def replan(
    problem: Problem, old_plan: Plan, seed: int | None = None, tables: Sequence[CostTable] | None = None
) -> SearchResult:
    """Search a plan for `problem`, warm-started.

    Args:
        old_plan: The plan that ran, of the same model.
        tables: Cost tables of the whole space; None builds them.

    Errors:
        InfeasibleError: no plan of the space fits the new cluster.
    """
    began = time.perf_counter()
    chosen = problem.config.search.seed if seed is None else seed
    space_kind = problem.config.space.kind
    whole = build_tables(problem) if tables is None else tables
    pruned = [without_dominated(table) for table in whole]
    best = _promising(pruned, old_plan, space_kind)
    config = problem.config.search
    warm = replace(
        config, num_steps=WARM_STEPS, num_restarts=WARM_RESTARTS, polish_starts=WARM_POLISHED,
        polish_finalists=1, temperature=[WARM_TEMPERATURE, config.temperature[1]],
    )  # fmt: skip
    parts, starts = _selected(pruned, best)
    result = search_tables(parts, space_kind, warm, chosen, starts=starts) if parts else None
    if result is None:
        result = search(problem, chosen)
    return replace(result, seconds=time.perf_counter() - began)


def _promising(tables: list[CostTable], plan: Plan, space_kind: str) -> dict[tuple[int, int], HardPlans]:
    """Return the carried-over plan of the outer choices where it is fastest, its stages cut again."""
    pool = PlanPool(tables, space_kind)
    for index, table in enumerate(tables):
        plans = carried_over(plan, table, space_kind)
        if len(plans):
            score = torch.zeros(len(plans)) if space_kind == "layerwise" else None
            pool.add(TablePlans(index, plans), repair_score=score)
            if space_kind != "stagewise" and table.virtual_stages == 1:
                cut = [repartitioned(table, plans[i : i + 1]) for i in range(len(plans))]
                pool.add(TablePlans(index, HardPlans.concatenate(cut)))
        # what the old plan does not suggest: one strategy for all layers
        pool.add(TablePlans(index, even_uniform_plans(table)))
    ranked = pool.by_outer()
    leading = list(dict.fromkeys(entry.table for entry in ranked))[:TABLES]
    by_table = [[entry for entry in ranked if entry.table == table][:PER_TABLE] for table in leading]
    return {entry.outer: entry.plan for entries in by_table for entry in entries}


def _selected(
    tables: list[CostTable], best: dict[tuple[int, int], HardPlans]
) -> tuple[list[CostTable], list[TablePlans]]:
    """Return tables of the promising outer choices alone, and their first plans."""
    parts: list[CostTable] = []
    starts: list[TablePlans] = []
    for index in sorted({table for table, _ in best}):
        outers = sorted(outer for table, outer in best if table == index)
        plans = HardPlans.concatenate([best[index, outer] for outer in outers])
        starts.append(TablePlans(len(parts), replace(plans, outer=torch.arange(len(outers)))))
        parts.append(tables[index].select(outers))
    return parts, starts


def carried_over(plan: Plan, table: CostTable, space_kind: str) -> HardPlans:
    """Return the closest plan that each outer choice of a table allows.

    Args:
        plan: Of the same model, on whatever cluster.
        table: Of the new cluster.
        space_kind: Space; the result stays in it.
    """
    starts = _scaled_starts(plan, table)
    stages = torch.searchsorted(starts, torch.arange(table.num_layers), right=True) - 1
    distinct = {s: torch.tensor([_distance(s, c) for c in table.choices]) for s in set(plan.layers)}
    distance = torch.stack([distinct[s] for s in plan.layers])
    if space_kind == "uniform":
        distance = distance.sum(0, keepdim=True).expand_as(distance)
    elif space_kind == "stagewise":
        distance = torch.zeros(table.num_stages, len(table.choices)).index_add(0, stages, distance)[stages]
    uniform = table.runnable.all(0).expand(table.num_layers, -1)
    legal = uniform if space_kind == "uniform" else table.runnable[stages]
    rows, outers = [], []
    for outer in range(table.num_outer):
        masked = distance.masked_fill(~(legal & table.allowed[outer]), torch.inf)
        if bool(masked.amin(1).isfinite().all()):
            rows.append(masked.argmin(1))
            outers.append(outer)
    if not rows:
        empty = torch.zeros(0, dtype=torch.long)
        return HardPlans(empty, empty.view(0, table.num_layers), empty.view(0, table.num_stages))
    return HardPlans(torch.tensor(outers), torch.stack(rows), starts.expand(len(rows), -1))


def _scaled_starts(plan: Plan, table: CostTable) -> torch.Tensor:
    """Return first layers of the stages: the old ones, stretched to another number of stages, `(K,)`."""
    units = unit_starts(table.fused_to_previous)
    old = torch.searchsorted(units, torch.tensor(plan.boundaries[:-1])).tolist()
    old.append(len(units))
    edges = []
    for stage in range(1, table.num_stages):
        position = stage * (len(old) - 1) / table.num_stages
        left = min(int(position), len(old) - 2)
        edges.append(old[left] + (position - left) * (old[left + 1] - old[left]))
    return units[round_edges(torch.tensor([edges], dtype=torch.float64), len(units))[0]]


def _distance(old: LayerStrategy, new: LayerStrategy) -> float:
    """Return how far two strategies are apart; what changes the layout or the memory most weighs most."""
    return (
        4.0 * abs(log2(old.tp / new.tp))
        + 2.0 * (old.recompute != new.recompute)
        + 1.0 * (old.sequence_parallel != new.sequence_parallel and new.tp > 1)
        + 0.5 * abs(old.zero_stage - new.zero_stage)
        + 0.25 * (old.tp_comm_bits != new.tp_comm_bits) + 0.25 * (old.grad_comm_bits != new.grad_comm_bits)
        + 0.5 * abs(log2(old.ep / new.ep)) + 0.5 * abs(log2(old.etp / new.etp))
        + 0.1 * (old.shard_size != new.shard_size)
    )  # fmt: skip
