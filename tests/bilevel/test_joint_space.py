from math import log

import pytest
import torch

from darts_parallel.bilevel._relaxed_plans import UpperLevel, price_plans
from darts_parallel.bilevel.conclusion import find_learned_optimum
from darts_parallel.bilevel.joint_space import (
    FIRST_BLOCK,
    JointSpace,
    LogSlowdown,
    with_bits,
    with_fixed_bits,
)
from darts_parallel.config.schema import SearchConfig
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from tests.support.bilevel_tiny import tiny_problem

PROBLEM = tiny_problem(tp_bits=(16, 4, 2), grad_bits=(16, 2))
SPACE = JointSpace.build(PROBLEM, [8])


def prices(seed: int, scale: float = 0.3) -> LogSlowdown:
    """Random prices of few bits; exact pairs cost nothing."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        lossy = torch.tensor([bits < 16 for _, bits in pairs])
        return (
            scale * torch.rand(SPACE.num_blocks, len(pairs), generator=generator).double() * lossy
        )

    forward, gradient = SPACE.forward_pairs, SPACE.gradient_pairs
    return LogSlowdown(forward, gradient, drawn(forward), drawn(gradient), {8: 0.4})


def random_plans(table: int, count: int, seed: int) -> HardPlans:
    own, generator = SPACE.tables[table], torch.Generator().manual_seed(seed)
    outer = torch.randint(own.num_outer, (count,), generator=generator)
    weights = own.allowed[outer].double().unsqueeze(1).expand(-1, own.num_layers, -1)
    choices = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(count, -1)
    starts = torch.arange(own.pp) * 2
    return HardPlans(outer, choices, starts.expand(count, -1))


@pytest.mark.parametrize("table", range(len(SPACE.tables)))
def test_a_plan_in_words_costs_what_the_table_says_and_its_edges_travel_at_16_bits(
    table: int,
) -> None:
    plans = random_plans(table, 12, seed=table)
    for index in range(12):
        one = plans[index : index + 1]
        priced = price_plans(SPACE, table, one, prices(0))
        plan = SPACE.to_plan(table, one)
        assert evaluate(plan, PROBLEM).iteration_time_s == pytest.approx(priced.seconds, rel=1e-12)
        assert priced.log_slowdown == pytest.approx(
            prices(0).of_plan(SPACE.blocks_of(plan), 8), abs=1e-12
        )
        edges = (*plan.layers[:FIRST_BLOCK], *plan.layers[FIRST_BLOCK + SPACE.num_blocks :])
        assert {(layer.tp_comm_bits, layer.grad_comm_bits) for layer in edges} == {(16, 16)}


def test_a_table_of_fixed_bits_prices_the_plans_that_have_them() -> None:
    for number, table in enumerate(SPACE.whole):
        bits = [(16, 16), (4, 2), (2, 16), (16, 16), (16, 16)]
        own = with_fixed_bits(table, bits)
        choices = torch.arange(len(own.choices)).unsqueeze(1).expand(-1, own.num_layers)
        plans = HardPlans(
            torch.zeros(len(choices), dtype=torch.long),
            choices,
            (torch.arange(own.pp) * 2).expand(len(choices), -1),
        )
        from_table = [plans[i : i + 1].to_plan(0, own) for i in range(len(choices))]
        legal = own.allowed[0].tolist()
        for index, plan in enumerate(from_table):
            if legal[index]:
                cost = evaluate(with_bits(plan, bits), PROBLEM).iteration_time_s
                assert cost == pytest.approx(
                    float(evaluate_batch(own, plans[index : index + 1]).iteration_time), rel=1e-12
                )
        assert number == SPACE.of_batch(8)[number]


@pytest.mark.parametrize("seed", range(3))
def test_the_learned_optimum_is_that_of_brute_force(seed: int) -> None:
    known = prices(seed, scale=(0.02, 0.3, 1.0)[seed])
    found = find_learned_optimum(SPACE, known, 60.0)
    assert found.proven
    best = min(brute_force(number, known) for number in range(len(SPACE.tables)))
    assert found.plan.value == pytest.approx(best, abs=1e-7)
    assert found.lower_bound <= best + 1e-9


def brute_force(number: int, known: LogSlowdown) -> float:
    """Least objective of all plans of one table whose edge layers follow the fastest choice of theirs."""
    table = SPACE.tables[number]
    count, layers = len(table.choices), table.num_layers
    best = float("inf")
    # strategies of equal degrees cost an edge layer the same: one of each is enough
    degrees = {(c.tp, c.dp): i for i, c in enumerate(table.choices)}
    edges, inner = torch.tensor(sorted(degrees.values())), torch.arange(count)
    rows = torch.cartesian_prod(edges, *[inner] * SPACE.num_blocks, edges)
    rows = torch.cat([rows, rows[:, -1:]], dim=1)
    for outer in range(table.num_outer):
        for cut in range(1, layers - 1) if table.pp == 2 else [0]:
            starts = [0, cut] if table.pp == 2 else [0]
            hard = HardPlans(
                torch.full((len(rows),), outer), rows, torch.tensor([starts]).expand(len(rows), -1)
            )
            priced = price_plans(SPACE, number, hard, known)
            if priced is not None:
                best = min(best, priced.value)
    return best


def test_free_bits_make_the_learned_optimum_the_fastest_plan_and_dear_bits_the_exact_one() -> None:
    zero = LogSlowdown.zero(SPACE.forward_pairs, SPACE.gradient_pairs, SPACE.num_blocks, [8])
    free, expensive = (
        find_learned_optimum(SPACE, zero, 60.0),
        find_learned_optimum(SPACE, prices(0, 1e3), 60.0),
    )
    assert free.plan.seconds < expensive.plan.seconds
    assert all(
        candidate.lossless
        for candidate in SPACE.blocks_of(SPACE.to_plan(expensive.plan.table, expensive.plan.plans))
    )


def test_a_constant_added_to_a_blocks_prices_changes_no_plan() -> None:
    known = prices(1)
    moved = LogSlowdown(
        known.forward_pairs,
        known.gradient_pairs,
        known.forward - 0.1,
        known.gradient,
        known.by_batch,
    )
    a, b = find_learned_optimum(SPACE, known, 60.0), find_learned_optimum(SPACE, moved, 60.0)
    assert b.plan.value == pytest.approx(a.plan.value - 0.1 * SPACE.num_blocks, abs=1e-7)


def test_the_relaxed_objective_is_the_hard_one_at_one_hot_weights_and_the_logits_come_near_the_optimum() -> (
    None
):
    known = prices(2)
    found = find_learned_optimum(SPACE, known, 60.0)
    upper = UpperLevel(SPACE, SearchConfig(num_restarts=4), 60, torch.Generator().manual_seed(0))
    for _ in range(60):
        step = upper.step(known)
    assert step.plan.value >= found.plan.value - 1e-9
    assert step.plan.value < found.plan.value + log(1.1)
    # cold weights are nearly one-hot: the leading relaxed plan is priced as its rounding
    assert step.record.loss == pytest.approx(step.plan.value, abs=0.1)
