"""Runs priced by what they change cost what the changed plans cost."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.gradient._run_moves import RunMoves
from tests.support.random_plans import random_plans
from tests.support.random_tables import random_table


@pytest.mark.parametrize(("pp", "layouts"), [(1, 1), (1, 3), (2, 2), (3, 1), (4, 3)])
def test_every_run_and_strategy_costs_what_evaluation_says(pp: int, layouts: int) -> None:
    seen = 0
    for seed in range(6):
        table = random_table(
            seed, pp=pp, num_layers=7, num_layouts=layouts, tightness=0.9 + seed % 3
        )
        kinds, choices = table.forward.shape[1], len(table.choices)
        rng = torch.Generator().manual_seed(seed)
        admitted = torch.rand(kinds, choices, generator=rng) < 0.8
        admitted[:, int(table.allowed[1].double().argmax())] = True
        blocking = PipelineModel(blocking=seed % 3 != 0)
        table = replace(table, pipeline=blocking, kind_allowed=admitted if seed % 2 else None)
        plan = random_plans(table, table.num_outer, rng)[1:2]
        legal = table.allowed[1] & table.runs(
            table.stage_kind[plan.stages()[0]].unsqueeze(1), torch.arange(choices).expand(7, -1)
        )
        plan = replace(plan, choices=torch.multinomial(legal.double(), 1, generator=rng).T)
        ends = [*plan.first_layers[0].tolist(), table.num_layers]
        runs = np.array(
            [
                (first, end)
                for low, high in pairwise(ends)
                for first in range(low, high)
                for end in range(first + 1, high + 1)
            ]
        )
        moves = RunMoves.price(table, plan, runs)
        rows = []
        for first, end in runs:
            for choice in range(choices):
                changed = plan.choices[0].clone()
                changed[first:end] = choice
                rows.append(changed)
        plans = HardPlans(
            plan.outer.expand(len(rows)), torch.stack(rows), plan.first_layers.expand(len(rows), -1)
        )
        cost = evaluate_batch(table, plans)
        true = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        torch.testing.assert_close(
            torch.from_numpy(moves.seconds).flatten(), true, rtol=1e-9, atol=0
        )
        best, seconds = moves.best()
        assert seconds == pytest.approx(float(true.min()), rel=1e-9)
        if seconds < float("inf"):
            assert float(evaluate_batch(table, best).iteration_time[0]) == pytest.approx(
                seconds, rel=1e-9
            )
            seen += 1
    assert seen
