"""Galvatron (Miao et al., VLDB 2023): layer-wise dynamic programming under a memory budget.

Section 4: for every pipeline degree and batch split the layers are cut into stages beforehand, evenly, or
balanced by time or by memory (Galvatron-BMW's two ends), and inside each stage a dynamic program over
layers, memory and strategies minimises the stage's seconds with the cost of changing layout between layers.
Here that program is `StageSolver`, which keeps labels instead of slots of quantized memory. What is lost
against the exact planner: stages are cut before strategies are known, and each is solved for itself.
"""

import numpy as np
import torch

from baselines.incumbent import Incumbent
from baselines.planner import on_problems, on_tables
from baselines.stage_costs import OuterChoice, bottleneck_split, outer_choices
from darts_parallel.cost.hard_plans import HardPlans, even_uniform_plans
from darts_parallel.exact.chosen_stages import ChosenStages
from darts_parallel.gradient.stage_solver import StageSolver


def offer_plans(incumbent: Incumbent, space_kind: str, seed: int) -> None:
    """Offer every cut of every outer choice, each stage with its best strategies."""
    for outer in outer_choices(incumbent):
        table = incumbent.tables[outer.table]
        solver = StageSolver(table, outer.outer)
        for starts in _cuts(outer, even_uniform_plans(table).first_layers[0].tolist()):
            choices = _solve_stages(solver, starts)
            if choices is not None:
                rows = ([outer.outer], [choices], [starts])
                incumbent.offer(outer.table, HardPlans(*(torch.tensor(row) for row in rows)))
            if incumbent.over():
                break


solve = on_tables(offer_plans)
find_plan = on_problems(solve)


def _cuts(outer: OuterChoice, even: list[int]) -> list[list[int]]:
    """Even stages, stages of about equal seconds, and of about equal memory; each at most once."""
    costs = outer.costs
    fastest = int(costs.time.sum(axis=(0, 1)).argmin())
    stages = ChosenStages.uniform(costs, fastest)
    kept = costs.static[None] + costs.in_flight[:, None, None] * costs.activation[None]
    smallest = int(kept.sum(axis=(0, 1)).argmin())
    share = kept[:, :, smallest] / costs.capacity[:, None].clip(min=1.0)
    values = (stages.seconds(), stages.segments.sums(share, np.arange(costs.pp)))
    found = [even, *(bottleneck_split(stages.segments, value) for value in values)]
    return [list(starts) for starts in dict.fromkeys(tuple(s) for s in found if s is not None)]


def _solve_stages(solver: StageSolver, starts: list[int]) -> list[int] | None:
    """Strategies of all layers, stage by stage; None where a stage does not fit."""
    choices: list[int] = []
    for stage, (first, end) in enumerate(zip(starts, [*starts[1:], solver.table.num_layers], strict=True)):
        before = int(solver.layout[choices[-1]]) if choices else -1
        answers = solver.solve(stage, first, end, before, -1, weights=1)
        if not answers:
            return None
        choices += answers[0]
    return choices
