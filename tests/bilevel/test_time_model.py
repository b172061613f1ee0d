from itertools import product
from typing import Any

import pytest
import torch
from darts_parallel.bilevel.time_model import TimeModel, build_time_model

from darts_parallel.bilevel.candidates import Candidate, candidate_set
from darts_parallel.bilevel.retrain import fastest_plan, fastest_with_bits, random_plan_of_equal_time
from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.plan.strategy import LayerStrategy
from tests.support.bilevel_tiny import tiny_problem

CHANGES = {"num_blocks": 3, "width": 96, "context": 64, "global_batch_size": 16}


def model(network: str = "slow", num_blocks: int = 3) -> TimeModel:
    bits: dict[str, Any] = {"tp_bits": (16, 4), "grad_bits": (16, 2)}
    sizes = CHANGES | {"num_blocks": num_blocks}
    problem = tiny_problem(f"{network}_network", **bits, **sizes)
    return build_time_model(problem, candidate_set(problem))


def test_at_one_hot_weights_the_expected_seconds_are_those_of_the_hard_plan() -> None:
    time = model()
    count = len(time.choices.candidates)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        index = torch.randint(count, (3,), generator=generator)
        first, last = (int(i) for i in torch.randint(len(time.degrees), (2,), generator=generator))
        weights = torch.nn.functional.one_hot(index, count).double()
        soft = time.seconds(weights, torch.eye(len(time.degrees), dtype=torch.float64)[[first, last]])
        edges = [
            time.choices.candidates.index(Candidate(time.degrees[i], 8 // time.degrees[i]))
            for i in (first, last)
        ]
        row = torch.tensor([[edges[0], *index.tolist(), edges[1], edges[1]]])
        hard = evaluate_batch(
            time.table, HardPlans(torch.zeros(1, dtype=torch.long), row, torch.zeros(1, 1).long())
        )
        assert float(soft) == pytest.approx(float(hard.iteration_time), rel=1e-12)


def test_sixteen_bits_cost_what_the_package_predicts_without_bits() -> None:
    time = model()
    index = time.choices.candidates.index(Candidate(2, 4))
    other = time.choices.candidates.index(Candidate(2, 4, 4, 16))
    terms = {name: float(term[0, 0, 1, index]) for name, term in time.table.terms.items()}
    block = float((time.table.forward + time.table.backward + time.table.sync)[0, 0, 1, index])
    assert time.table.choices[index] == LayerStrategy(2, 4)
    assert block == pytest.approx(sum(terms.values()), rel=1e-12)
    # four bits and a scale of sixteen for each block of 64 shorten the forward half, latencies stay
    saved = float((time.table.forward[..., index] - time.table.forward[..., other])[0, 0, 1])
    latency = 2 * 2 * 0.2e-6  # two all-reduces of two hops
    assert saved == pytest.approx((1 - 4.25 / 16) * (terms["tensor_parallel"] / 2 - latency), rel=1e-9)
    assert float((time.table.backward[..., index] - time.table.backward[..., other]).abs().max()) == 0.0


def test_fewer_bits_are_never_slower() -> None:
    time = model()
    candidates = time.choices.candidates
    seconds = dict(zip(candidates, time.plan_seconds([(c,) * 3 for c in candidates]).tolist(), strict=True))
    for c in candidates:
        for fewer in candidates:
            if (
                fewer.tp == c.tp
                and fewer.tp_comm_bits <= c.tp_comm_bits
                and fewer.grad_comm_bits <= c.grad_comm_bits
            ):
                assert seconds[fewer] <= seconds[c] * (1 + 1e-12)


def test_bits_matter_on_the_slow_network_and_not_on_the_fast_one() -> None:
    for network, least, most in (("slow", 1.5, 10.0), ("fast", 1.0, 1.01)):
        time = model(network)
        exact, few = time.plan_seconds([(Candidate(2, 4),) * 3, (Candidate(2, 4, 4, 2),) * 3]).tolist()
        assert least <= exact / few <= most


def test_seconds_have_the_gradient_of_finite_differences() -> None:
    time = model()
    count = len(time.choices.candidates)
    weights = torch.full((3, count), 1.0 / count, dtype=torch.float64, requires_grad=True)
    edges = torch.full(
        (2, len(time.degrees)), 1.0 / len(time.degrees), dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda w, e: 1e3 * time.seconds(w, e), (weights, edges))


def test_the_fastest_plan_is_that_of_brute_force() -> None:
    time = model(num_blocks=2)
    candidates = time.choices.candidates
    everything = list(product(candidates, repeat=2))
    best = float(time.plan_seconds(everything).min())
    assert float(time.plan_seconds([fastest_plan(time, 2, candidates)])[0]) == pytest.approx(best, rel=1e-12)
    lossless = [p for p in everything if all(c.lossless for c in p)]
    found = fastest_with_bits(time, 2, 16)
    assert all(c.lossless for c in found)
    assert float(time.plan_seconds([found])[0]) == pytest.approx(
        float(time.plan_seconds(lossless).min()), rel=1e-12
    )


def test_a_random_plan_of_equal_time_is_another_plan_of_nearly_the_same_seconds() -> None:
    time = model()
    plan = (Candidate(2, 4, 4, 2),) * 3
    other = random_plan_of_equal_time(time, plan, torch.Generator().manual_seed(0))
    assert other != plan
    a, b = time.plan_seconds([plan, other]).tolist()
    assert b == pytest.approx(a, rel=0.05)


def test_a_group_of_one_rank_has_no_bits_to_choose() -> None:
    choices = candidate_set(tiny_problem(num_devices=4, tp=(1, 4)))
    assert {c.tp_comm_bits for c in choices.candidates if c.tp == 1} == {16}
    assert {c.grad_comm_bits for c in choices.candidates if c.dp == 1} == {16}


def test_hard_picks_the_degree_by_its_total_weight() -> None:
    choices = candidate_set(tiny_problem(tp=(1, 2), tp_bits=(16, 8, 4, 2), grad_bits=(16, 4)))
    weights = torch.tensor([0.2 if c.tp == 1 else 0.6 / 8 for c in choices.candidates])
    weights[choices.candidates.index(Candidate(2, 4, 4, 16))] += 0.01
    assert choices.hard(weights.unsqueeze(0)) == (Candidate(2, 4, 4, 16),)


def test_the_whole_plan_costs_what_evaluate_says() -> None:
    problem = tiny_problem("slow_network", **CHANGES)
    time = build_time_model(problem, candidate_set(problem))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        index = torch.randint(len(time.choices.candidates), (3,), generator=generator).tolist()
        blocks = tuple(time.choices.candidates[i] for i in index)
        cost = evaluate(time.whole_plan(blocks), problem)
        assert cost.iteration_time_s == pytest.approx(float(time.plan_seconds([blocks])[0]), rel=1e-12)
