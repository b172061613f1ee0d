"""The planners that try plans at random: their moves, their rules, and what all planners are told."""

import time

import pytest
import torch

from baselines import annealing, flexflow, random_search
from baselines._moves import Chains, MoveWeights, PlanSpace, RandomMoves
from baselines._planner import DEFAULT_SECONDS, Incumbent, Planner
from baselines._stage_costs import promising
from baselines.annealing import metropolis
from darts_parallel.cost import PricedPlan, even_uniform_plans
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.exact import lower_bound
from darts_parallel.exact.result import TableResult
from darts_parallel.problem.problem import load_problem
from tests.support.few_steps import solved
from tests.support.random_tables import tables_of_one_model
from tests.support.rivals import answer

PLANNERS = {"random_search": random_search, "annealing": annealing, "flexflow": flexflow}
EVERY_MOVE = MoveWeights(layer=1, run=1, stage=1, whole=1, edge=1, outer=1, jump=1)


def moves_over(
    tables: list[CostTable], seed: int, weights: MoveWeights = EVERY_MOVE
) -> RandomMoves:
    space = PlanSpace(Incumbent(tables))
    return RandomMoves(space, weights, torch.Generator().manual_seed(seed))


def assert_legal(chains: Chains, space: PlanSpace) -> None:
    """Rising stage starts at units, as many as stages; allowed strategies."""
    table_pp = space.pp[chains.table]
    for starts, pp in zip(chains.first_layers.tolist(), table_pp.tolist(), strict=True):
        assert starts[0] == 0
        assert sorted(set(starts[:pp])) == starts[:pp]
        assert set(starts[:pp]) <= set(space.units.tolist())
        assert set(starts[pp:]) <= {space.num_layers}
    assert space.allowed[chains.table, chains.outer].gather(1, chains.choices).all()


def test_random_plans_and_every_change_of_them_are_legal() -> None:
    for seed in range(4):
        moves = moves_over(tables_of_one_model(seed), seed)
        chains = moves.random_plans(60)
        assert_legal(chains, moves.space)
        for _ in range(6):
            before, chains = chains, moves.propose(chains)
            assert_legal(chains, moves.space)
        assert len({tuple(row) for row in before.first_layers.tolist()}) > 1


def test_a_flexflow_proposal_changes_one_layer_or_moves_edges_by_one_or_changes_the_outer_choice() -> (
    None
):
    moves = moves_over(tables_of_one_model(1), 1, flexflow.WEIGHTS)
    before = moves.random_plans(400)
    after = moves.propose(before)
    same_outer = (before.table == after.table) & (before.outer == after.outer)
    layers = (before.choices != after.choices).sum(1)[
        same_outer & (before.first_layers == after.first_layers).all(1)
    ]
    assert int(layers.max()) == 1
    same_table = before.table == after.table
    assert (
        int((before.first_layers - after.first_layers).abs()[same_table].max()) <= 2
    )  # joined layers move together


def test_the_metropolis_rule_at_its_two_ends_and_at_one_hand_worked_temperature() -> None:
    moves = moves_over(tables_of_one_model(2), 3)
    chains = moves.random_plans(2000)
    energy = moves.space.price(chains)
    _, cold = metropolis(moves, chains, energy, 1e-12)
    assert (cold <= energy).all()
    assert (cold < energy).any()
    # a rise of ln 2 at temperature 1 is accepted with probability 1/2
    level = energy.clone()
    moves.space.price = lambda _: level + torch.log(torch.tensor(2.0))  # type: ignore[method-assign]
    _, warm = metropolis(moves, chains, energy, 1.0)
    assert float((warm > energy).double().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", PLANNERS)
def test_equal_seeds_agree(name: str) -> None:
    def run(seed: int) -> TableResult:
        return solved(PLANNERS[name].solve, tables_of_one_model(4), seed, 20)

    result = run(7)
    again = run(7)
    assert again.cost == result.cost
    assert result.cost < float("inf")
    assert again.plans_evaluated == result.plans_evaluated


@pytest.mark.parametrize("name", PLANNERS)
def test_a_budget_is_kept_and_the_plan_is_the_problems_own(name: str) -> None:
    problem = load_problem(["experiment=quick"])
    began = time.monotonic()
    result = answer(PLANNERS[name].solve, problem, budget=0.3, seed=1)
    assert time.monotonic() - began < 2.0
    cost = evaluate(result.plan, problem)
    assert cost.feasible
    assert cost.iteration_time_s == pytest.approx(result.iteration_time_s, rel=1e-9)


def test_a_planner_is_told_seed_and_deadline() -> None:
    seen: list[Incumbent] = []
    planner = Planner("seen", seen.append, seeded=True)
    planner.solve(tables_of_one_model(4), seed=7, deadline=0.0)
    planner.solve(tables_of_one_model(4))
    first, second = seen
    assert first.seed == 7
    assert first.over()
    assert second.seed == 0
    assert time.monotonic() < second.deadline <= time.monotonic() + DEFAULT_SECONDS


def test_promising_configurations_come_by_their_bounds_while_one_may_win() -> None:
    incumbent = Incumbent(tables_of_one_model(4))
    bounds = [lower_bound(outer.costs, "layerwise") for outer in promising(incumbent)]
    assert len(bounds) > 1
    assert bounds == sorted(bounds)
    incumbent.best = PricedPlan(0, even_uniform_plans(incumbent.tables[0]), bounds[1])
    assert len(list(promising(incumbent))) == 1
