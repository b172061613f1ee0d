"""Plans of least memory: each layer has its lightest strategy on its own stage."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans
from darts_parallel.cost.lightest import _fill, _lightest, lightest_plans
from darts_parallel.cost.table import build_tables
from darts_parallel.exact.enumeration import _all_plans
from darts_parallel.problem.problem import load_problem
from tests.support.random_tables import random_table

TWO_STAGES = ["model=toy", "training=toy", "cluster=toy", "space.pp=2", "space.num_micro_batches=4"]


def test_a_layer_has_the_strategy_that_is_lightest_with_the_micro_batches_of_its_stage() -> None:
    (table,) = build_tables(
        load_problem([*TWO_STAGES, "space.recompute=[none,full]", "space.axis_order=tp-dp-pp"])
    )
    first, last = table.in_flight[0].tolist()
    assert first > last
    # choice 0 keeps a part of the activations that the others keep, and more whatever is in flight
    static = torch.zeros_like(table.static)
    activation = torch.full_like(table.activation, 2.0)
    activation[..., 0] = 1.0
    static[..., 0] = (first + last) / 2
    table = replace(table, static=static, activation=activation, working=torch.zeros_like(static))
    plan = _lightest(table, "layerwise")
    chosen = (plan.choices[0] == 0).tolist()
    assert chosen == (plan.stages()[0] == 0).tolist()


def test_stages_are_plain_where_a_device_has_one_and_keeps_all_in_its_own_memory() -> None:
    plain = {
        "space.schedules=[1f1b]": True,
        "space.virtual_stages=2": False,
        "space.offload=[activation]": False,
    }
    for words, expected in plain.items():
        for table in build_tables(load_problem([*TWO_STAGES, words])):
            assert table.has_plain_stages == expected


def test_stages_fill_the_same_share_of_their_memory() -> None:
    size = torch.tensor([[2.0] * 6, [1.0] * 6])
    assert _fill(size, torch.tensor([100.0, 100.0])).tolist() == [0, 2]
    assert _fill(size, torch.tensor([100.0, 25.0])).tolist() == [0, 4]


def test_an_outer_choice_that_allows_nothing_has_no_lightest_plan() -> None:
    table = random_table(0, num_outer=3)
    allowed = table.allowed.clone()
    allowed[1] = False
    (plans,) = lightest_plans([replace(table, allowed=allowed)], "layerwise")
    assert set(plans.outer.tolist()) == {0, 2}


@pytest.mark.parametrize("kind", ["uniform", "stagewise", "layerwise"])
@pytest.mark.parametrize("seed", range(4))
def test_the_lightest_plans_take_legal_strategies_and_nearly_the_least_memory(
    kind: str, seed: int
) -> None:
    table = random_table(3 * seed, pp=2, num_layers=5, num_outer=1, tightness=0.5)
    zero = torch.zeros_like(table.working)
    table = replace(table, working=zero, fused_to_previous=table.fused_to_previous & False)
    (plans,) = lightest_plans([table], kind)
    roomy = replace(table, capacity=1e9 * table.capacity)

    def least(some: HardPlans) -> float:
        cost = evaluate_batch(roomy, some)
        peak = (cost.memory / table.capacity).amax(1)
        return float(peak.masked_fill(~cost.feasible, torch.inf).min())

    assert evaluate_batch(roomy, plans).feasible.all()
    best = min(least(some) for some in _all_plans(table, kind))
    # stages hold whole layers, and a layer is a fifth of all
    assert best * (1 - 1e-9) <= least(plans) <= 1.3 * best


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_split_fills_the_fullest_stage_less(seed: int, uneven: bool) -> None:
    """Greedy filling of very uneven layers in nearly as many stages took twice the memory."""
    rng = torch.Generator().manual_seed(seed)
    stages = (4 if uneven else 1) + seed % 4
    units = 7 + seed % 3
    layers, held = 1 + torch.rand(2, units, generator=rng)
    size = 100 * (layers + torch.rand(stages, 1, generator=rng) * held)
    if uneven:
        size = 100 * torch.rand(stages, units, generator=rng) ** 3
    capacity = 50 + 100 * torch.rand(stages, generator=rng)

    def fullest(starts: list[int]) -> float:
        ends = [*starts[1:], units]
        rows = zip(size, starts, ends, capacity, strict=True)
        return max(float(row[first:end].sum() / room) for row, first, end, room in rows)

    every = [[0, *inner] for inner in combinations(range(1, units), stages - 1)]
    best = fullest(min(every, key=fullest))
    assert fullest(_fill(size, capacity).tolist()) == pytest.approx(best, rel=1e-5)


def test_layers_share_the_strategy_that_is_lightest_where_they_may_run_it() -> None:
    chosen = set()
    for seed in range(20):
        table = random_table(seed, pp=2, num_layers=6, num_choices=4, num_outer=1)
        rng = torch.Generator().manual_seed(seed)
        runs = torch.rand(2, 4, generator=rng) < 0.7
        legal = table.allowed[0] & runs
        if not legal.all(0).any():
            continue
        wide = {
            name: getattr(table, name)[:, :1].repeat(1, 2, 1, 1)
            for name in ("forward", "backward", "weight_gradient", "sync")
        }
        table = replace(table, **wide, stage_kind=torch.arange(2), kind_allowed=runs)
        in_flight = table.in_flight[0].view(2, 1, 1)
        needed = table.static[0] + in_flight * table.activation[0] + table.working[0] / 2
        plan = _lightest(table, "uniform")
        total = needed.sum((0, 1)).masked_fill(~legal.all(0), torch.inf)
        assert set(plan.choices[0].tolist()) == {int(total.argmin())}
        each = needed.sum(1).masked_fill(~legal, torch.inf).argmin(1)
        plan = _lightest(table, "stagewise")
        assert plan.choices[0].tolist() == each[plan.stages()[0]].tolist()
        alone = needed.masked_fill(~legal.unsqueeze(1), torch.inf).argmin(2)
        plan = _lightest(table, "layerwise")
        assert plan.choices[0].tolist() == alone[plan.stages()[0], torch.arange(6)].tolist()
        chosen.add((int(total.argmin()), *each.tolist()))
    assert len(chosen) > 5
