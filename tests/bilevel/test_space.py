from dataclasses import replace

import pytest
import torch

from darts_parallel.bilevel.logits import UpperLevel
from darts_parallel.bilevel.optimum import find_optimum
from darts_parallel.bilevel.space import FIRST_BLOCK, JointSpace, LogSlowdown
from darts_parallel.config.schema import SearchConfig
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.hard_plans import HardPlans
from tests.support.bilevel_tiny import tiny_problem

PROBLEM = tiny_problem(tp_bits=(16, 4, 2), grad_bits=(16, 2))
SPACE = JointSpace.build(PROBLEM, [8])
GIVEN = 8


def prices(seed: int, scale: float = 0.3) -> LogSlowdown:
    """Random prices of few bits; exact pairs cost nothing."""
    generator = torch.Generator().manual_seed(seed)
    free = SPACE.free

    def drawn(pairs: tuple[tuple[int, int], ...]) -> torch.Tensor:
        lossy = torch.tensor([bits < 16 for _, bits in pairs])
        random = torch.rand(SPACE.num_blocks, len(pairs), generator=generator)
        return scale * random.double() * lossy

    forward, gradient = drawn(free.forward_pairs), drawn(free.gradient_pairs)
    return replace(free, forward=forward, gradient=gradient, by_batch={GIVEN: 0.4})


def random_plans(table: int, count: int, seed: int) -> HardPlans:
    own, generator = SPACE.tables[table], torch.Generator().manual_seed(seed)
    outer = torch.randint(own.num_outer, (count,), generator=generator)
    weights = own.allowed[outer].double().unsqueeze(1).expand(-1, own.num_layers, -1)
    choices = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view(count, -1)
    return HardPlans(outer, choices, (torch.arange(own.pp) * 2).expand(count, -1))


@pytest.mark.parametrize("table", range(len(SPACE.tables)))
def test_a_plan_in_words_costs_what_the_table_says_at_the_learned_prices(table: int) -> None:
    known = prices(0)
    plans = random_plans(table, 12, seed=table)
    for index in range(12):
        one = plans[index : index + 1]
        found = SPACE.price(table, one, known)
        assert evaluate(found.plan, PROBLEM).iteration_time_s == pytest.approx(found.seconds)
        edges = [found.plan.layers[0], *found.plan.layers[FIRST_BLOCK + SPACE.num_blocks :]]
        lossy = sum(
            min(layer.tp_comm_bits if layer.tp > 1 else 16, layer.grad_comm_bits) < 16
            for layer in edges
        )
        steps = known.of_plan(found.blocks, GIVEN) + lossy
        assert found.log_slowdown == pytest.approx(steps, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_at_the_learned_prices_is_that_of_brute_force(seed: int) -> None:
    known = prices(seed, scale=(0.02, 0.3, 1.0)[seed])
    found = find_optimum(SPACE, known, GIVEN, 60.0)
    assert found.proven
    best = min(brute_force(number, known) for number in range(len(SPACE.tables)))
    value = torch.tensor(found.seconds).double().log() + found.log_slowdown
    assert float(value) == pytest.approx(best, abs=1e-6)


def brute_force(number: int, known: LogSlowdown) -> float:
    """Least objective of all plans of one table whose edge layers send 16 bits."""
    table = SPACE.tables[number]
    count, layers = len(table.choices), table.num_layers
    best = float("inf")
    exact = [
        i for i, c in enumerate(table.choices) if c.tp_comm_bits == 16 and c.grad_comm_bits == 16
    ]
    edges, inner = torch.tensor(exact), torch.arange(count)
    rows = torch.cartesian_prod(edges, *[inner] * SPACE.num_blocks, edges)
    rows = torch.cat([rows, rows[:, -1:]], dim=1)
    for outer in range(table.num_outer):
        for cut in range(1, layers - 1) if table.pp == 2 else [0]:
            starts = torch.tensor([[0, cut] if table.pp == 2 else [0]])
            outers = torch.full((len(rows),), outer)
            hard = HardPlans(outers, rows, starts.expand(len(rows), -1))
            priced = SPACE.price(number, hard, known)
            if priced is not None:
                best = min(best, priced.value)
    return best


def test_free_bits_make_the_optimum_the_fastest_plan_and_expensive_bits_the_exact_one() -> None:
    free = find_optimum(SPACE, SPACE.free, GIVEN, 60.0)
    expensive = find_optimum(SPACE, prices(0, 1e3), GIVEN, 60.0)
    assert free.seconds < expensive.seconds
    assert all(block.lossless for block in expensive.blocks)
    banned = find_optimum(SPACE, SPACE.free.at_bits(16, 16), GIVEN, 60.0)
    assert banned.seconds == pytest.approx(expensive.seconds)
    two = find_optimum(SPACE, SPACE.free.at_bits(2, 2), GIVEN, 60.0)
    bits = {block.tp_comm_bits for block in two.blocks if block.tp > 1}
    assert bits <= {2, 16}


def test_the_logits_come_near_the_optimum_and_stay_where_they_are_told_to() -> None:
    known = prices(2)
    found = find_optimum(SPACE, known, GIVEN, 60.0)
    upper = UpperLevel(SPACE, SearchConfig(num_restarts=4), 60, torch.Generator().manual_seed(0))
    start = [group.logits.detach().clone() for group in upper.groups]
    upper.step(known, move=False)
    assert all(torch.equal(a, b.logits) for a, b in zip(start, upper.groups, strict=True))
    for _ in range(60):
        record = upper.step(known)
    assert not any(torch.equal(a, b.logits) for a, b in zip(start, upper.groups, strict=True))
    rounded = upper.rounded(known, GIVEN)
    least = torch.tensor(found.seconds).double().log() + found.log_slowdown
    # the exact methods end within 1e-7 of the optimum
    assert float(least) - 1e-7 <= rounded.value < float(least) + 0.1
    # cold weights are nearly one-hot: the leading relaxed plan is priced as its rounding
    assert record.loss == pytest.approx(rounded.value, abs=0.1)
    assert record.outer_weights.pop("batch 8") == pytest.approx(1.0)
    assert sum(record.outer_weights.values()) == pytest.approx(1.0)
