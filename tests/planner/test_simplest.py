"""Ties go to few strategies and even stages, and neighbours share all but the degrees."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from darts_parallel import evaluate, load_problem, plan
from darts_parallel.config import Config, Trainer
from darts_parallel.cost.table import build_tables
from darts_parallel.planner._session import Asked
from darts_parallel.planner._simplest import (
    neighbours,
    recomputed_first,
    simplest_within,
    with_one_end,
)
from darts_parallel.plans import LayerStrategy, Plan

JOB = [
    "model=toy",
    "cluster=toy",
    "space.pp=2",
    "space.num_micro_batches=4",
    "verification.enabled=false",
    "search.num_steps=10",
    "search.num_restarts=4",
]


def test_no_simpler_plan_is_taken_that_breaks_the_deadline() -> None:
    """The command refused the deadline by the seconds of the simpler plan, as those of the fastest."""
    job = ["model=toy", "cluster=toy_mixed", "search.num_steps=5", "search.num_restarts=2"]
    job += ["objective=cost_under_deadline", "objective.num_iterations=3600000", "search.tie=0.2"]
    job += [f"cluster.nodes.{group}.price_per_hour_usd=1" for group in (0, 1)]
    hours = {}
    for limit in (2.0, 1.42):
        found = plan(load_problem([*job, f"objective.deadline_hours={limit}"]))
        assert found.result is not None
        hours[limit] = 1000 * found.result.iteration_time_s
    assert hours[1.42] < 1.42 < hours[2.0]


@pytest.mark.parametrize("mixed", [False, True])
def test_neighbours_have_all_degrees_but_those_of_a_plan_with_one_strategy(mixed: bool) -> None:
    problem = load_problem([*JOB, "cluster.devices.toy.memory_GiB=8"])
    tables = build_tables(problem)
    degrees = {(choice.dp, choice.tp) for table in tables for choice in table.choices}
    first = LayerStrategy(4, 1)
    last = replace(first, recompute="full") if mixed else first
    layers = (*(first,) * (problem.num_layers - 1), last)
    own = Plan(4, (0, 3, problem.num_layers), layers)
    near = list(neighbours(own, tables))
    found = [(other.layers[0].dp, other.layers[0].tp) for _, other in near]
    assert sorted(found) == sorted(degrees if mixed else degrees - {(1, 4)})
    for seconds, other in near:
        assert len(set(other.layers)) == 1
        assert (other.pp, other.num_micro_batches) == (2, 4)
        assert seconds == pytest.approx(evaluate(other, problem).iteration_time_s)


@pytest.mark.parametrize("memory", [0.13, 0.15, 0.3])
def test_a_simpler_plan_is_taken_within_the_tie_and_none_beyond_it(memory: float) -> None:
    problem = load_problem(
        [*JOB, f"cluster.devices.toy.memory_GiB={memory}", "space.out_of_memory=0.5"]
    )
    best = plan(problem).plan
    seconds = evaluate(best, problem).iteration_time_s
    found = simplest_within([best], Asked.of(problem, tables=()), seconds * 1.01)
    cost = evaluate(found, problem)
    assert cost.feasible
    assert cost.iteration_time_s <= seconds * 1.01
    assert len(set(found.layers)) <= len(set(best.layers))
    near = list(neighbours(best, build_tables(problem)))
    assert near
    assert [time for time, _ in near] == sorted(time for time, _ in near)
    for time, other in near:
        assert (other.pp, other.num_micro_batches) == (best.pp, best.num_micro_batches)
        assert len(set(other.layers)) == 1
        assert time == pytest.approx(evaluate(other, problem).iteration_time_s)
    assert all(one.layers[0].tp != other.layers[0].tp for (_, one), (_, other) in pairwise(near))


def test_recomputed_layers_come_first_in_a_stage_at_equal_cost() -> None:
    problem = load_problem([*JOB, "space.tp=1", "space.recompute=[none,full]"])
    asked = Asked.of(problem, tables=())
    best = plan(problem).plan
    scattered = ["none", "none", "full", "none", "full", "full", "none"]
    pairs = zip(best.layers, scattered[: len(best.layers)], strict=True)
    layers = tuple(replace(best.layers[2], recompute=kind) for _, kind in pairs)
    mixed = replace(best, layers=layers)
    ordered = recomputed_first(mixed, asked)
    assert ordered != mixed
    assert evaluate(ordered, problem).iteration_time_s == pytest.approx(
        evaluate(mixed, problem).iteration_time_s, rel=1e-12
    )
    for first, end in pairwise(ordered.boundaries):
        blocks = [
            layer.recompute == "full"
            for layer, spec in zip(ordered.layers, problem.model.layers, strict=True)
            if spec.recomputable
        ][max(first - 1, 0) : end - 1]
        assert blocks == sorted(blocks, reverse=True)
    counts = [[own.recompute for own in one.layers].count("full") for one in (mixed, ordered)]
    assert counts[0] == counts[1]


def test_ends_share_the_fastest_strategy_where_a_trainer_wants_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = load_problem(JOB)
    asked = Asked.of(problem, tables=())
    narrow, wide, slow = LayerStrategy(1, 4), LayerStrategy(2, 2), LayerStrategy(1, 4, 3, "full")
    mixed = Plan(4, (0, 3, 7), (narrow, narrow, wide, slow, wide, narrow, wide))
    assert with_one_end(mixed, [], asked) is mixed
    monkeypatch.setattr(Config, "rules", Trainer(whole_ends="always"))
    same = [
        replace(mixed, layers=(end, *mixed.layers[1:5], end, end)) for end in (narrow, wide, slow)
    ]
    seconds = [evaluate(own, problem).iteration_time_s for own in same]
    assert with_one_end(mixed, [], asked) == same[seconds.index(min(seconds))]
    other = replace(mixed, layers=(narrow,) * 7)
    assert evaluate(other, problem).iteration_time_s < min(seconds) < max(seconds)
    assert with_one_end(mixed, [other], asked) == other


CHUNKS = [*JOB, "model.num_layers=8", "space.virtual_stages=2", "space.zero_stage=[0,1]"]


MIXED = "cluster=toy_mixed"


@pytest.mark.parametrize(
    "more",
    [[], ["space.cp=2"], ["space.virtual_stages=1"], [MIXED], [MIXED, "space.virtual_stages=1"]],
)
def test_a_tie_pays_for_few_stage_sizes_and_strategies(more: list[str]) -> None:
    """Also with chunks, cp and nodes of several types; with 0 nothing is slower than the fastest."""
    loose = plan(load_problem([*CHUNKS, *more, "search.tie=0.2"]))
    tight = plan(load_problem([*CHUNKS, *more, "search.tie=0"]))
    slower = loose.result.iteration_time_s / tight.result.iteration_time_s
    assert 1 - 1e-9 <= slower <= 1.2 * (1 + 1e-3)

    def effort(one: Any) -> tuple[int, int]:
        sizes = {end - first for first, end in pairwise(one.plan.boundaries)}
        return len(set(one.plan.layers)), len(sizes)

    assert effort(loose) <= effort(tight)
    assert len(set(loose.plan.layers)) == 1


def test_exact_search_keeps_the_optimum_whatever_the_tie() -> None:
    job = [*JOB, "search=exact", "verification.enabled=true"]
    seconds = [
        plan(load_problem([*job, f"search.tie={tie}"])).result.iteration_time_s for tie in (0, 0.2)
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


def test_qwen3_on_64_gpus_lists_the_plan_that_is_usual_for_megatron() -> None:
    job = ["model=qwen3_30b_a3b", "cluster=h100_8x8", "trainer=megatron", "search.num_steps=20"]
    found = plan(load_problem(job))
    listed = [found.plan, *(own for _, own in found.result.alternatives)]
    usual = [one for one in listed if one.pp == 2 and one.layers[1].ep == 8]
    assert any({own.zero_stage for own in one.layers} == {1} for one in usual)
