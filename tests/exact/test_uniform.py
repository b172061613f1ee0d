"""The vectorised uniform planner against enumeration."""

import math
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from darts_parallel.cost import OuterCosts, PricedPlan, build_tables
from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, even_uniform_plans
from darts_parallel.exact import segments, uniform
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.exact.result import LATE, TOO_LARGE, deadline_check
from darts_parallel.exact.uniform import (
    _even_seconds,
    _Search,
    find_uniform_plan,
    find_uniform_within,
    stages_hold,
    uniform_bounds,
)
from darts_parallel.problem import load_problem
from tests.support.random_tables import random_table

SPLITS = tuple(combinations(range(1, 6), 2))
"""First layers of the second and the third stage of 6 layers."""


def test_uniform_optimum_equals_brute_force() -> None:
    for seed in range(12):
        tables = [
            random_table(
                seed,
                pp=pp,
                num_layers=7,
                num_choices=4,
                equal_layers=seed % 2 == 0,
                tightness=0.3 + 0.2 * (seed % 5),
            )
            for pp in (1, 3)
        ]
        expected, found = brute_force(tables, "uniform"), find_uniform_plan(tables)
        assert found.proven
        assert found.cost == pytest.approx(expected.cost, rel=1e-12)


def test_bounds_of_all_configurations_lie_below_their_best_splits() -> None:
    for seed in range(8):
        table = random_table(seed, pp=1 + seed % 4, num_layers=7, tightness=1.0)
        for o, legal in enumerate(table.allowed & table.runnable.all(0)):
            own = torch.nonzero(legal)[:, 0]
            bounds = uniform_bounds(table, o, own.numpy(), deadline_check(math.inf))
            assert not np.isnan(bounds).any()
            for c, bound in zip(own.tolist(), bounds.tolist(), strict=True):
                only = table.select([o])
                only.allowed.copy_(torch.arange(len(table.choices)) == c)
                assert bound <= brute_force([only], "uniform").cost * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_of_several_levels_of_memory_the_loosest_whose_plan_keeps_the_rule_counts(
    seed: int,
) -> None:
    usual = random_table(seed, pp=3, num_layers=7, num_choices=4, tightness=0.6)
    looser = [[replace(usual, capacity=share * usual.capacity)] for share in (1.5, 1.2)]
    costs = [find_uniform_plan(tables).cost for tables in (*looser, [usual])]

    def least(rule: float) -> float:
        def keeps(plan: PricedPlan) -> bool:
            peak = evaluate_batch(usual, plan.plan).memory.amax()
            return bool(peak <= rule * usual.stage_capacity.amax())

        return find_uniform_within(
            [*looser, [usual]], keeps, math.inf, math.inf, 1, even=False
        ).cost

    assert least(math.inf) == pytest.approx(costs[0], rel=1e-12)
    assert least(0.0) == pytest.approx(costs[2], rel=1e-12)
    assert costs[0] * (1 - 1e-12) <= least(1.2) <= costs[1] * (1 + 1e-12)


def test_what_fits_with_more_memory_alone_is_found_where_it_keeps_the_rule() -> None:
    table = random_table(0, tightness=3.0)
    small = replace(table, capacity=torch.full_like(table.capacity, 1e-3))
    for kept, seconds in ((True, find_uniform_plan([table]).cost), (False, math.inf)):
        found = find_uniform_within(
            [[table], [small]], lambda _, kept=kept: kept, math.inf, math.inf, 1, even=False
        )
        assert found.cost == seconds


def test_alternatives_are_the_best_configurations_in_order() -> None:
    for seed in range(4):
        table = random_table(seed, pp=2, num_layers=6, num_choices=4, tightness=1.5)
        ranked = find_uniform_plan([table], count=3).alternatives
        expected = []
        for o, c in torch.nonzero(table.allowed).tolist():
            only = table.select([o])
            only.allowed.copy_(torch.arange(len(table.choices)) == c)
            expected.append(brute_force([only], "uniform").cost)
        expected = sorted(x for x in expected if math.isfinite(x))[:3]
        assert [x.time for x in ranked] == pytest.approx(expected, rel=1e-12)
        for candidate in ranked:
            assert float(evaluate_batch(table, candidate.plan).iteration_time[0]) == candidate.time


def test_no_plan_is_proven_where_none_fits() -> None:
    result = find_uniform_plan([random_table(3, tightness=-20.0)])
    assert result.best is None
    assert result.verification([]).note == "no plan fits"
    assert math.isinf(result.lower_bound)


def test_what_all_devices_together_cannot_hold_is_not_split_into_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("darts_parallel.exact.uniform.uniform_bounds", None)
    small = random_table(3, pp=2, tightness=0.0)
    everything = small.static + small.in_flight.amin(1)[:, None, None] * small.activation
    least = (everything.sum(1) + small.working.amax(1))[small.allowed].min()
    below = replace(small, capacity=torch.full((2,), 0.49999 * float(least), dtype=torch.float64))
    assert find_uniform_plan([below]).best is None
    with pytest.raises(TypeError):
        find_uniform_plan([replace(small, capacity=below.capacity * 10.0)])


def test_what_no_stages_in_their_order_hold_is_not_split_into_them() -> None:
    """Layers that all devices together hold may be too many for the first stages, which keep more."""
    for seed in range(12):
        table = random_table(seed, pp=3, num_layers=6, tightness=0.5)
        table.fused_to_previous.zero_()
        for outer, legal in enumerate(table.allowed):
            own = torch.nonzero(legal)[:, 0].tolist()
            held = stages_hold(OuterCosts.whole(table, outer), np.array(own))
            expected = []
            for choice in own:
                plans = [HardPlans.one(outer, [choice] * 6, (0, *ends)) for ends in SPLITS]
                cost = evaluate_batch(table, HardPlans.concatenate(plans))
                if (cost.memory <= table.capacity).all(1).any():
                    expected.append(choice)
            assert np.array(own)[held].tolist() == expected


def test_bounds_need_no_more_memory_for_more_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(0, pp=2, num_layers=6, num_choices=8, tightness=50.0)
    choices = np.arange(8)
    whole = uniform_bounds(table, 0, choices, deadline_check(math.inf))
    sizes = []
    real = uniform._split_bounds

    def recorded(costs: OuterCosts, batch: np.ndarray) -> np.ndarray:
        sizes.append(len(batch))
        return real(costs, batch)

    monkeypatch.setattr(uniform, "_split_bounds", recorded)
    # the 36 pairs of layers of three strategies
    monkeypatch.setattr(uniform, "MAX_ELEMENTS", 3 * 36)
    np.testing.assert_array_equal(
        uniform_bounds(table, 0, choices, deadline_check(math.inf)), whole
    )
    assert sizes == [3, 3, 2]


def test_a_single_strategy_without_a_pipeline_is_found_although_its_bound_is_exact() -> None:
    for seed in range(10):
        table = random_table(seed, pp=1, num_choices=1, num_layouts=1, tightness=50.0)
        assert find_uniform_plan([table]).cost == pytest.approx(
            brute_force([table], "uniform").cost, rel=1e-12
        )


def test_an_interleaved_plan_slower_than_what_is_known_is_not_given() -> None:
    toy = ["model=toy", "training=toy", "cluster=toy", "space=uniform"]
    tables = build_tables(load_problem([*toy, "space.virtual_stages=[2]", "space.pp=2"]))
    best = find_uniform_plan(tables).best
    assert find_uniform_plan(tables, deadline=0.0).lower_bound <= best.time
    refused = find_layerwise_plan(tables, "layerwise")
    assert (refused.best, refused.proven, refused.plans_evaluated) == (None, False, 0)
    assert find_uniform_plan(tables, incumbent=0.7 * best.time).best is None
    assert find_uniform_plan(tables, incumbent=1.1 * best.time).cost == best.time


def test_even_interleaved_plans_are_ranked_whatever_table_is_first() -> None:
    toy = ["model=toy", "training=toy", "cluster=toy", "space=uniform", "space.pp=2"]
    tables = build_tables(load_problem([*toy, "space.virtual_stages=[2,3]"]))
    for given in (tables, tables[::-1]):
        found = find_uniform_plan(given, even=True, count=4)
        best: dict[tuple[int, ...], float] = {}
        for number, table in enumerate(given):
            for apart in (True, False):
                plans = even_uniform_plans(table, ends_apart=apart)
                pairs = zip(plans.outer.tolist(), plans.choices[:, 0].tolist(), strict=True)
                times = evaluate_batch(table, plans).fitting_seconds.tolist()
                for (outer, choice), time in zip(pairs, times, strict=True):
                    key = (number, outer, choice)
                    best[key] = min(time, best.get(key, math.inf))
        assert [plan.time for plan in found.alternatives] == sorted(best.values())[:4]


def test_even_plans_that_fit_limit_what_is_looked_for() -> None:
    table = random_table(0, tightness=2.0)
    cost = evaluate_batch(table, even_uniform_plans(table))
    assert _even_seconds([table], 1) == float(cost.iteration_time[cost.feasible].min())


@pytest.mark.parametrize("space_kind", ["uniform", "layerwise"])
def test_a_part_with_too_many_segments_is_named_and_the_others_are_solved(
    space_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [random_table(3, pp=pp, num_layers=7, num_choices=4, tightness=2.0) for pp in (1, 4)]
    solved = brute_force(tables[:1], space_kind)
    optimum = brute_force(tables, space_kind)
    # the optimum lies in the part that is left out
    assert optimum.cost < solved.cost
    # 28 segments of 1 stage, 40 of 4 stages
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 30)
    found = find_layerwise_plan(tables, space_kind)
    assert found.best is not None
    assert optimum.cost * (1 - 1e-12) <= found.cost <= solved.cost * (1 + 1e-12)
    assert 0 < found.lower_bound <= optimum.cost
    assert not found.proven
    assert "pp=4" in found.note
    assert "pp=1" not in found.note


def test_a_part_that_is_too_large_and_too_slow_does_not_end_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = [random_table(3, pp=pp, num_layers=7, num_choices=4, tightness=2.0) for pp in (1, 4)]
    for values in (tables[1].forward, tables[1].backward):
        values.mul_(1000.0)
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 30)
    for space_kind in ("uniform", "layerwise"):
        found = find_layerwise_plan(tables, space_kind)
        assert found.proven
        assert found.note == ""
        assert found.cost == pytest.approx(brute_force(tables[:1], space_kind).cost, rel=1e-12)


@pytest.mark.parametrize("space_kind", ["uniform", "layerwise"])
def test_the_note_of_a_large_part_names_the_clock_where_it_ended_the_others(
    space_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [random_table(4, pp=pp, num_layers=7, num_choices=4, tightness=2.0) for pp in (3, 6)]
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 30)
    for deadline, ended in ((math.inf, False), (0.0, True)):
        note = find_layerwise_plan(tables, space_kind, deadline=deadline).note
        assert note.startswith(TOO_LARGE)
        assert note.endswith(LATE) == ended


@pytest.mark.parametrize("space_kind", ["uniform", "layerwise"])
def test_without_a_part_that_is_small_enough_the_even_plan_is_the_answer(
    space_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_table(3, pp=4, num_layers=8, num_choices=4, tightness=2.0)
    even = _even_seconds([table], 1)
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 0)
    found = find_layerwise_plan([table], space_kind)
    assert not found.proven
    assert found.cost <= even * (1 + 1e-12)
    assert found.lower_bound <= brute_force([table], "uniform").cost


@pytest.mark.parametrize("limit", ["deadline", "size"])
def test_a_plan_that_only_uneven_stages_fit_is_found_without_a_search(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = random_table(3, pp=2, num_layers=8, num_choices=1, num_outer=1)
    choices = torch.zeros(1, 8, dtype=torch.long)
    uneven = HardPlans(torch.tensor([0]), choices, torch.tensor([[0, 6]]))
    table.capacity.copy_(evaluate_batch(table, uneven).memory[0] * 1.01)
    assert math.isinf(_even_seconds([table], 1))
    if limit == "size":
        monkeypatch.setattr(segments, "MAX_SEGMENTS", 0)
    deadline = 0.0 if limit == "deadline" else math.inf
    found = find_uniform_plan([table], deadline=deadline)
    assert not found.proven
    assert math.isfinite(found.cost)


@pytest.mark.parametrize(("complete", "floor"), [(True, 2.0), (False, 1.5)])
def test_an_unfinished_search_proves_no_more_than_the_bound_that_it_has_reached(
    complete: bool, floor: float
) -> None:
    left = SimpleNamespace(too_large=[], reached=1.5, ranking=SimpleNamespace(floor=2.0))
    assert _Search.floor(left, complete) == floor
