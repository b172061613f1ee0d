"""Bottleneck moves in the manner of AdaPtis (2025, arXiv 2509.23722): find what delays most, relieve that.

From the best even split of every outer choice and schedule: the device that is busy longest gives a unit at
either end of one of its chunks to the neighbouring chunk, or recomputes otherwise; the best of these moves
is taken while one helps. The outer choices take turns, best first.
"""

import torch

from baselines._planner import Incumbent, on_tables
from darts_parallel.cost import CostTable, HardPlans, evaluate_batch, even_uniform_plans, unit_starts


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer all that the moves reach from the best even splits."""
    starts: list[tuple[float, int, HardPlans]] = []
    for number, table in enumerate(incumbent.tables):
        plans = even_uniform_plans(table)
        cost = incumbent.offer(number, plans)
        times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        for outer in range(table.num_outer):
            mine = torch.where(plans.outer == outer, times, torch.inf)
            if bool(mine.isfinite().any()):
                best = int(mine.argmin())
                starts.append((float(mine[best]), number, plans[best : best + 1]))
    for seconds, number, plan in sorted(starts, key=lambda entry: entry[:2]):
        _relieve(incumbent, number, plan, seconds, space_kind)


solve = on_tables(offer_plans, layerwise=True, closed_form=False, chunks=True)


def _relieve(incumbent: Incumbent, number: int, plan: HardPlans, seconds: float, space_kind: str) -> None:
    """Take the best move of the busiest device while one helps."""
    table = incumbent.tables[number]
    while not incumbent.over():
        moves = bottleneck_moves(table, plan, space_kind)
        if not len(moves):
            return
        cost = incumbent.offer(number, moves)
        times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        best = int(times.argmin())
        if not float(times[best]) < seconds * (1 - 1e-12):
            return
        plan, seconds = moves[best : best + 1], float(times[best])


def bottleneck_moves(table: CostTable, plan: HardPlans, space_kind: str) -> HardPlans:
    """Return all single moves that relieve the busiest device."""
    busiest = int(evaluate_batch(table, plan).stage_seconds[0].argmax())
    units = unit_starts(table.fused_to_previous)
    place = torch.searchsorted(units, plan.first_layers[0].contiguous())
    rows = [place.clone() for _ in range(2 * table.num_stages)]
    own = torch.nonzero(table.stage_device == busiest).flatten().tolist()
    moved = []
    for stage in own:
        for edge, step in ((stage, 1), (stage + 1, -1)):
            if 0 < edge < table.num_stages:
                row = rows.pop()
                row[edge] += step
                moved.append(row)
    ends = torch.tensor([len(units)])
    legal = [row for row in moved if bool((torch.cat([row, ends]).diff() > 0).all())]
    starts = units[torch.stack(legal)] if legal else plan.first_layers[:0]
    parts = [HardPlans(plan.outer.expand(len(starts)), plan.choices.expand(len(starts), -1), starts)]
    if space_kind == "layerwise":
        stages = plan.stages()[0]
        for stage in own:
            count = len(table.choices)
            choices = torch.where(stages == stage, torch.arange(count).unsqueeze(1), plan.choices)
            parts.append(HardPlans(plan.outer.expand(count), choices, plan.first_layers.expand(count, -1)))
    return HardPlans.concatenate(parts)
