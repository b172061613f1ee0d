"""Shares in host memory of all devices together: never worse, and as good as a fine grid."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from darts_parallel.cost import CostTable, HardPlans, PricedPlan, evaluate_batch
from darts_parallel.cost.host_memory import OffloadedPlans
from darts_parallel.cost.table import build_tables
from darts_parallel.gradient import host_shares
from darts_parallel.gradient.host_shares import with_finished_shares
from darts_parallel.problem.problem import load_problem

GRID = 100
"""Points between 0 and 1 for each share of activations."""


def on_grid(table: CostTable, plan: HardPlans, entry: PricedPlan) -> float:
    """Return the least seconds over a grid of shares of activations on every device.

    The share of optimizer state is the least that fits. For a limit on synchronisation every device
    takes its fastest stage; all limits on the grid are tried.
    """
    assert table.host is not None
    own = OffloadedPlans(table, plan.outer, plan.choices, plan.stages(), table.host)
    points = []
    for share in torch.linspace(0.0, 1.0, GRID, dtype=torch.float64):
        sent = share.expand(1, table.pp)
        points.append(torch.stack([sent, own._state_needed(sent)], -1)[0])
    costs = []
    for shares in points:
        given = replace(table, host=replace(table.host, fractions=shares))
        costs.append(evaluate_batch(given, plan))
    stages = torch.cat([cost.stage_seconds for cost in costs])
    syncs = torch.cat([cost.sync_seconds for cost in costs])
    fits = torch.cat([cost.memory for cost in costs]) <= table.capacity * (1 + 1e-9)
    count = float(table.num_micro_batches[plan.outer[0]])
    first = evaluate_batch(table, plan)
    seconds, sync = first.stage_seconds[0], first.sync_seconds[0].max()
    rest = entry.time - float(seconds.sum() + (count - 1) * seconds.max() + sync)
    best = float("inf")
    for limit in syncs[fits].unique()[::7].tolist():
        allowed = torch.where(fits & (syncs <= limit), stages, torch.inf).amin(0)
        best = min(best, float(allowed.sum() + (count - 1) * allowed.max()) + limit + rest)
    return best


@cache
def plans_of(name: str) -> list[tuple[CostTable, PricedPlan]]:
    """Return even uniform plans in which several devices offload a share between 0 and 1."""
    words, pp = CASES[name]
    problem = load_problem([*words, f"space.pp={pp}", "space.offload=[activation,optimizer]"])
    found = []
    for index, table in enumerate(build_tables(problem)):
        size = table.num_layers // pp
        first = torch.arange(pp) * size
        for outer, choice in torch.nonzero(table.allowed).tolist():
            choices = torch.full((1, table.num_layers), choice)
            plan = HardPlans(torch.tensor([outer]), choices, first.unsqueeze(0))
            cost = evaluate_batch(table, plan)
            shares = torch.tensor(plan.to_plan(0, table).offload)
            inside = ((shares > 1e-3) & (shares < 1 - 1e-3)).sum() if len(shares) else 0
            if bool(cost.feasible) and int(inside) >= 2:
                found.append((table, PricedPlan(index, plan, float(cost.iteration_time))))
    return sorted(found, key=lambda pair: pair[1].time)


SMALL = ["model=gpt2_xl", "cluster=a10_4x4", "space.tp=1"]
CASES = {
    "gpt2_xl, 6 GiB": ([*SMALL, "cluster.devices.a10.memory_GiB=6"], 4),
    "gpt2_xl, 8 stages": ([*SMALL, "cluster.devices.a10.memory_GiB=6"], 8),
    "llama2_7b": (["model=llama2_7b", "cluster=a10_4x4", "space.tp=4"], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_finished_shares_are_those_of_a_fine_grid(name: str) -> None:
    plans = plans_of(name)
    assert plans
    gained = 0
    for table, entry in plans[:3]:
        plan = entry.plan.to_plan(0, table)
        found, seconds = with_finished_shares(table, entry, plan)
        assert seconds <= entry.time
        shares = torch.tensor(found.offload, dtype=torch.float64)
        cost = host_shares._priced(table, entry.plan, shares)
        assert bool(cost.feasible)
        assert float(cost.iteration_time) == pytest.approx(seconds, rel=1e-12)
        # the grid is not finer than 1 / GRID
        assert seconds <= on_grid(table, entry.plan, entry) * (1 + 1e-6)
        gained += seconds < entry.time * (1 - 1e-6)
    assert gained


def test_plans_without_a_closed_form_keep_their_shares() -> None:
    ((table, entry), *_) = plans_of("gpt2_xl, 6 GiB")
    plan = entry.plan.to_plan(0, table)
    simulated = replace(table, pipeline=replace(table.pipeline, simulated=True))
    assert with_finished_shares(simulated, entry, plan) == (plan, entry.time)
    bare = replace(plan, offload=())
    assert with_finished_shares(table, entry, bare) == (bare, entry.time)
