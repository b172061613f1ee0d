"""`cost=searcher` is searched by gradient over products dp x tp x pp, and checked by enumeration."""

from math import prod

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.searcher import SearcherModel, products
from darts_parallel.errors import InfeasibleError, UnsupportedError
from darts_parallel.planner._searcher import (
    ProductSearch,
    prime_factors,
    product_session,
    relaxed_degrees,
)
from darts_parallel.planner._session import Reported
from darts_parallel.planner.planning import plan
from darts_parallel.problem.problem import load_problem

RESERVED = "cluster.devices.a10.reserved_GiB=1"
JOB = ["model=gpt2_xl", "training=gpt2_xl", "cluster=a10_8x4", "cost=searcher", RESERVED]
TOY = ["model=toy", "cluster=toy", "training=toy", "cost=searcher", "search.num_steps=30"]


def random_model(seed: int, devices: int) -> SearcherModel:
    rng = torch.Generator().manual_seed(seed)
    size = (10.0 ** (4.0 * torch.rand(6, generator=rng, dtype=torch.float64))).tolist()
    gpus = int(torch.randint(1, 9, (1,), generator=rng))
    wide = [degree for degree in range(gpus + 1, devices + 1) if devices % degree == 0]
    return SearcherModel(
        flops=1e3 * size[0],
        peak=size[1],
        gradients=size[2],
        activation=size[3],
        collectives=4,
        inside=10 * size[4],
        between=size[5],
        gpus=gpus,
        beyond=float(min(wide, default=float("inf"))),
    )


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
        for soft, hard in zip(
            model.terms(*degrees).values(), model.terms(*whole).values(), strict=True
        ):
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


def test_the_descent_finds_the_best_product_of_the_toy_by_itself() -> None:
    planned = plan(load_problem([*TOY, "verification.enabled=false"]))
    assert planned.result.method == "gradient"
    assert planned.result.gradient_iteration_time_s == planned.answers[0].iteration_time_s


def test_a_record_describes_the_fastest_restart() -> None:
    search = ProductSearch({}, 8, random_model(0, 8), {}, "uniform")
    rng = torch.Generator().manual_seed(0)
    weights = torch.rand(5, 3, 3, generator=rng, dtype=torch.float64)
    seconds = torch.tensor([3.0, 5.0, 2.0, 4.0, 6.0], dtype=torch.float64)
    record = search._record(0, 1.0, weights, seconds)
    assert record.surrogate_time_s == 2.0
    assert torch.equal(record.probabilities, weights[2])


def test_the_search_descends_is_checked_and_names_what_does_not_run() -> None:
    problem = load_problem(TOY)
    planned = plan(problem)
    result, (answer,) = planned.result, planned.answers
    assert result.steps == 30
    assert result.gradient_iteration_time_s is not None
    assert (answer.name, answer.proven, answer.gap) == ("exhaustive", True, 0.0)
    assert all(record.probabilities.shape == (3, 3) for record in result.history)
    data = planned.files["configurations.json"]
    assert data["constants"]["IMBALANCE_PENALTY_FACTOR"] == 0.10
    chosen = (planned.plan.layers[0].dp, planned.plan.layers[0].tp, planned.plan.pp)
    rows = {(r["dp"], r["tp"], r["pp"]): r["iteration_time_s"] for r in data["configurations"]}
    assert set(rows) == set(products(8))
    assert [row["iteration_time_s"] for row in data["configurations"]] == sorted(rows.values())
    output = planned.files["output.json"]
    assert [(r["dp"], r["tp"], r["pp"]) for r in output] == sorted(rows, key=lambda r: (rows[r], r))
    assert [r["milliseconds"] for r in output] == pytest.approx(
        [1e3 * t for t in sorted(rows.values())]
    )
    faster = {product for product, seconds in rows.items() if seconds < rows[chosen]}
    assert {(r["dp"], r["tp"], r["pp"]) for r in data["skipped"]} == faster
    assert all(row["reason"] for row in data["skipped"])
    assert ("skipped" in answer.note) == bool(faster)
    assert evaluate(planned.plan, problem).iteration_time_s == pytest.approx(
        rows[chosen], rel=1e-12
    )


@pytest.mark.parametrize("method", ["exact", "auto"])
def test_without_descent_all_products_are_scored(method: str) -> None:
    exact, checked = plan(load_problem([*TOY, f"search={method}"])), plan(load_problem(TOY))
    assert exact.plan == checked.plan
    assert (exact.result.method, exact.result.steps) == ("exhaustive", 0)


def test_what_cannot_run_is_named_with_its_reason() -> None:
    planned = plan(load_problem([*JOB, "search=exact", "cluster.devices.a10.memory_GiB=2.8"]))
    reasons = {
        (row["dp"], row["tp"], row["pp"]): row["reason"]
        for row in planned.files["configurations.json"]["configurations"]
    }
    assert reasons[4, 8, 1] == "no legal strategy of the space"
    assert any(reason.startswith("lacks ") for reason in reasons.values())
    assert reasons[planned.plan.layers[0].dp, planned.plan.layers[0].tp, planned.plan.pp] == ""


@pytest.mark.parametrize("method", ["exact", "gradient"])
def test_where_no_product_runs_one_sentence_says_so(method: str) -> None:
    tiny = [
        *TOY,
        f"search={method}",
        "verification.enabled=false",
        "cluster.devices.toy.memory_GiB=0.0001",
    ]
    with pytest.raises(InfeasibleError, match="smallest changes that help"):
        plan(load_problem(tiny))
    # the even stages that the closed form knows need more than the best ones
    with pytest.raises(InfeasibleError, match="try cost=analytic"):
        plan(load_problem([*JOB, f"search={method}", "cluster.devices.a10.memory_GiB=2.55"]))


def test_pins_that_the_closed_form_cannot_price_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"try space\.cp=1"):
        product_session(load_problem([*TOY, "space.cp=2"]), Reported())
