"""What every rival of the registry keeps: legal plans, true costs, never below the optimum, its deadline."""

import time
from dataclasses import replace
from functools import cache

import pytest

from baselines import PLANNERS, amp, dynamic_programming, exhaustive
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.problem.problem import Problem
from tests.support.random_tables import random_table

SECONDS = 0.05
"""For a rival that never ends by itself, on tables that brute force prices in a blink."""


def tables_of(seed: int) -> list[CostTable]:
    """Tables of one model: the same layers are joined in all."""
    tables = [random_table(seed, pp=pp, num_layers=5, num_choices=3, tightness=1.2) for pp in (1, 3)]
    return [replace(table, fused_to_previous=tables[0].fused_to_previous) for table in tables]


@cache
def optimum(seed: int, kind: str) -> float:
    return brute_force(tables_of(seed), kind).cost


@pytest.mark.parametrize("name", PLANNERS)
def test_a_plan_is_legal_costs_what_is_claimed_and_never_less_than_the_optimum(name: str) -> None:
    planner, found = PLANNERS[name], 0
    for seed in range(4 if planner.seeded else 6):
        tables = tables_of(seed)
        kind = "layerwise" if planner.layerwise else "uniform"
        deadline = time.monotonic() + SECONDS if planner.seeded else None
        result = planner.solve(tables, kind, deadline=deadline, seed=seed)
        assert result.cost >= optimum(seed, kind) * (1 - 1e-12)
        assert not result.proven
        if result.best is not None:
            found += 1
            cost = evaluate_batch(tables[result.best.table], result.best.plan)
            assert bool(cost.feasible[0])
            assert float(cost.iteration_time[0]) == pytest.approx(result.cost, rel=1e-12)
            assert result.curve[-1][1] == result.cost
    assert found >= 2


@pytest.mark.parametrize("name", PLANNERS)
def test_a_deadline_that_is_over_ends_a_planner_before_it_has_tried_everything(name: str) -> None:
    tables = tables_of(1)
    over = PLANNERS[name].solve(tables, "uniform", deadline=time.monotonic() - 1.0)
    whole = PLANNERS[name].solve(tables, "uniform", deadline=time.monotonic() + SECONDS)
    assert over.plans_evaluated <= whole.plans_evaluated
    assert not over.proven


def test_the_doors_and_every_rival_answer_problems(toy_problem: Problem) -> None:
    best = exhaustive.find_plan(toy_problem)
    assert best.proven
    assert dynamic_programming.find_plan(toy_problem).iteration_time_s <= best.iteration_time_s * (1 + 1e-9)
    assert amp.find_plan(toy_problem, budget=5.0, seed=0).iteration_time_s >= best.iteration_time_s * (
        1 - 1e-9
    )
