"""`cost=searcher` is searched by gradient over products dp x tp x pp, and checked by enumeration."""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.searcher import SearcherModel, evaluate_configurations, products
from darts_parallel.planner.planning import plan
from darts_parallel.planner.searcher import RunnableProducts
from darts_parallel.planner.searcher_descent import (
    ProductSearch,
    neighbours,
    prime_factors,
    relaxed_degrees,
)
from darts_parallel.problem.problem import load_problem

JOB = ["model=gpt2_xl", "training=gpt2_xl", "cluster=a10_8x4", "cost=searcher"]
TOY = ["model=toy", "cluster=toy", "training=toy", "cost=searcher"]


def random_model(seed: int, devices: int) -> SearcherModel:
    rng = torch.Generator().manual_seed(seed)
    size = (10.0 ** (4.0 * torch.rand(6, generator=rng, dtype=torch.float64))).tolist()
    gpus = int(torch.randint(1, 9, (1,), generator=rng))
    wide = [degree for degree in range(gpus + 1, devices + 1) if devices % degree == 0]
    return SearcherModel(
        flops=1e3 * size[0], peak=size[1], gradients=size[2], activation=size[3], collectives=4,
        inside=10 * size[4], between=size[5], gpus=gpus, beyond=float(min(wide, default=float("inf"))),
    )  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 12, 30, 64, 97])
def test_one_hot_owners_of_the_prime_factors_are_priced_as_the_whole_product(devices: int) -> None:
    factors = prime_factors(devices)
    assert prod(factors) == devices
    model, rng = random_model(devices, devices), torch.Generator().manual_seed(devices)
    for _ in range(5):
        owners = torch.randint(3, (len(factors),), generator=rng)
        weights = torch.nn.functional.one_hot(owners, 3).double()
        degrees = relaxed_degrees(weights, torch.tensor(factors).double())
        whole = degrees.round()
        assert float(whole.prod()) == devices
        for soft, hard in zip(model.terms(*degrees).values(), model.terms(*whole).values(), strict=True):
            torch.testing.assert_close(soft, hard, rtol=1e-9, atol=0)
    soft = relaxed_degrees(
        torch.softmax(torch.randn(len(factors), 3).double(), -1), torch.tensor(factors).double()
    )
    assert float(soft.prod()) == pytest.approx(devices, rel=1e-12)


def test_the_slope_of_relaxed_products_matches_finite_differences() -> None:
    for seed in range(5):
        model, rng = random_model(seed, 60), torch.Generator().manual_seed(seed)
        factors = torch.tensor(prime_factors(60)).double()
        logits = torch.randn(len(factors), 3, generator=rng, dtype=torch.float64)

        def seconds(
            logits: torch.Tensor, model: SearcherModel = model, factors: torch.Tensor = factors
        ) -> torch.Tensor:
            degrees = relaxed_degrees(torch.softmax(logits, -1), factors)
            return torch.stack(list(model.terms(*degrees).values())).sum().log()

        assert torch.autograd.gradcheck(seconds, (logits.requires_grad_(),), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_the_polished_product_is_the_best_of_the_enumeration(seed: int) -> None:
    devices = [6, 8, 12, 16, 24, 36, 48, 64][seed]
    model, rng = random_model(seed, devices), torch.Generator().manual_seed(seed)
    every = list(products(devices))
    runnable = {p for p in every if float(torch.rand(1, generator=rng)) < 0.6} or set(every)
    search = ProductSearch(
        model, devices, SearchConfig(num_steps=30, num_restarts=4), lambda product: product in runnable
    )
    search.descend(seed)
    search.polish()
    degrees = torch.tensor(every, dtype=torch.float64).unbind(1)
    seconds = torch.stack(list(model.terms(*degrees).values())).sum(0).tolist()
    best = min((s, p) for s, p in zip(seconds, every, strict=True) if p in runnable)
    assert search.best is not None
    assert search.seen[search.best] == pytest.approx(best[0], rel=1e-12)


def test_what_cannot_run_is_named_with_its_rule() -> None:
    problem = load_problem(JOB)
    runnable = RunnableProducts.of(problem)
    assert runnable.reason((4, 8, 1)) == "tp 8 does not divide 25 attention heads"
    assert runnable.reason((1, 1, 32)) == ""
    assert runnable.plan((4, 8, 1)) is None
    little = [*JOB, "cluster.devices.a10.memory_GiB=3"]
    assert RunnableProducts.of(load_problem(little)).reason((32, 1, 1)).endswith(" GiB of 3.0 GiB")


def test_neighbours_keep_the_product_and_reach_every_one() -> None:
    reached, left = {(60, 1, 1)}, [(60, 1, 1)]
    while left:
        near = set(neighbours(left.pop()))
        assert all(prod(product) == 60 for product in near)
        left += near - reached
        reached |= near
    assert reached == set(products(60))


def test_the_search_descends_is_checked_and_names_what_does_not_run(tmp_path: Path) -> None:
    problem = load_problem([*TOY, "search.num_steps=30"])
    planned = plan(problem, folder=tmp_path)
    result, (answer,) = planned.result, planned.answers
    assert result is not None
    assert result.steps == 30
    assert result.gradient_iteration_time_s is not None
    assert (answer.name, answer.proven, answer.gap) == ("exhaustive", True, 0.0)
    assert all(record.probabilities.shape == (3, 3) for record in result.history)
    data = json.loads((tmp_path / "configurations.json").read_text())
    assert data["constants"]["IMBALANCE_PENALTY_FACTOR"] == 0.10
    chosen = (planned.plan.layers[0].dp, planned.plan.layers[0].tp, planned.plan.pp)
    rows = {(r["dp"], r["tp"], r["pp"]): r["iteration_time_s"] for r in data["configurations"]}
    faster = {product for product, seconds in rows.items() if seconds < rows[chosen]}
    assert {(r["dp"], r["tp"], r["pp"]) for r in data["skipped"]} == faster
    assert all(row["reason"] for row in data["skipped"])
    assert ("skipped" in answer.note) == bool(faster)
    assert float(evaluate_configurations(problem, [chosen]).iteration_time[0]) == pytest.approx(
        result.iteration_time_s, rel=1e-12
    )
