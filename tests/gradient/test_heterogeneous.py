"""Clusters of different nodes: orders, legality, placement in the plan file, and exact answers."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import isfinite

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate, evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.exact.layerwise import find_layerwise_plan
from darts_parallel.exact.uniform import find_uniform_plan
from darts_parallel.gradient.descent import search, search_tables
from darts_parallel.gradient.rounding import fill
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import Plan
from darts_parallel.problem.cluster import Cluster, Link, NodeGroup
from darts_parallel.problem.orders import node_orders, order_label
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.outcome import Outcome
from darts_parallel.report.plan_json import plan_dict
from darts_parallel.report.text import alternatives_table
from tests.support.mixed_clusters import random_mixed
from tests.support.optima import assert_same_optimum
from tests.support.random_plans import random_plans

MIXED = ["model=toy", "cluster=toy_mixed", "training=toy"]


def mixed(*overrides: str) -> Problem:
    return load_problem([*MIXED, *overrides])


def with_groups(problem: Problem, *groups: NodeGroup) -> Problem:
    return replace(problem, cluster=replace(problem.cluster, groups=groups))


def sizes(cluster: Cluster, *counts_and_gpus: tuple[int, int]) -> Cluster:
    """The cluster with its node groups resized."""
    groups = zip(cluster.groups, counts_and_gpus, strict=True)
    return replace(cluster, groups=tuple(replace(g, count=c, gpus=n) for g, (c, n) in groups))


@pytest.mark.parametrize(
    ("shape", "pp", "mode", "count"),
    [
        (((1, 4), (3, 4)), 4, "all", 4),
        (((1, 4), (3, 4)), 16, "all", 4),
        (((1, 4), (3, 4)), 2, "all", 0),  # a stage of 8 would mix
        (((2, 4), (2, 4)), 2, "all", 2),  # blocks of two nodes
        (((4, 8), (4, 8)), 8, "all", 70),
        (((8, 8), (8, 8)), 16, "auto", 16),
        (((8, 8), (8, 8)), 16, "adjacent", 2),
        (((8, 8), (8, 8)), 4, "auto", 6),
        (((1, 8), (2, 4)), 4, "all", 3),
        (((1, 8), (2, 4)), 2, "all", 2),
    ],
)
def test_orders_are_distinct_complete_and_never_mix_a_stage(
    shape: tuple[tuple[int, int], ...], pp: int, mode: str, count: int
) -> None:
    cluster = sizes(mixed().cluster, *shape)
    orders = node_orders(cluster, pp, mode)
    assert len(set(orders)) == len(orders) == count
    nodes = sum(c for c, _ in shape)
    for order in orders[:50]:
        assert sorted(order or range(nodes)) == list(range(nodes))
        assert cluster.arranged(order).stages_are_pure(pp)


def test_rank_order_alone_can_be_asked_for() -> None:
    assert {s.node_order for s in outer_spaces(mixed("space.node_orders=given"))} == {()}


def test_equal_node_groups_give_exactly_the_costs_of_one_group() -> None:
    pins = ["space.num_micro_batches=4", "space.zero_stage=1"]
    one = load_problem(["model=toy", "cluster=toy", "training=toy", *pins])
    (group,) = one.cluster.groups
    two = with_groups(one, replace(group, count=1, price_per_hour=1.0), replace(group, count=1))
    tables, again = (build_tables(p) for p in (one, two))
    assert len(tables) == len(again)
    for table, other in zip(tables, again, strict=True):
        for name in (
            "forward",
            "backward",
            "sync",
            "per_iteration",
            "reshard",
            "p2p",
            "capacity",
            "stage_kind",
            "static",
            "activation",
            "working",
            "boundary_kind",
        ):
            assert torch.equal(getattr(table, name), getattr(other, name)), name


def test_exact_planners_equal_brute_force_over_all_node_orders() -> None:
    feasible = 0
    for seed in range(3):
        problem = random_mixed(seed)
        tables = build_tables(problem)
        for mode in ("uniform", "stagewise", "layerwise"):
            cost = assert_same_optimum(tables, mode)
            feasible += isfinite(cost)
            if mode == "uniform":
                assert find_uniform_plan(tables).cost == pytest.approx(cost, rel=1e-12)
    assert feasible > 3


def test_a_plan_with_an_order_of_nodes_survives_its_file() -> None:
    problem = mixed("space.pp=4")
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for table in build_tables(problem, outer_spaces(problem)[:4]):
        plan = random_plans(table, 1, rng).to_plan(0, table)
        data = json.loads(json.dumps(plan_dict(Outcome(problem, plan, evaluate(plan, problem)))))
        assert Plan.from_dict(data) == plan
        assert sorted(r for stage in data["stages"] for r in stage["ranks"]) == list(range(8))
        seen.add(plan.node_order)
    assert len(seen) > 3


def test_ranks_that_tear_a_node_apart_are_refused() -> None:
    problem = mixed("space.pp=4")
    table = build_tables(problem, outer_spaces(problem)[:1])[0]
    plan = random_plans(table, 1, torch.Generator().manual_seed(0)).to_plan(0, table)
    data = plan_dict(Outcome(problem, plan, evaluate(plan, problem)))
    data["stages"][0]["ranks"], data["stages"][1]["ranks"] = [0, 2], [1, 3]
    with pytest.raises(PlanError, match=r"stages\[0\]\.ranks=.*try 0 to 1"):
        Plan.from_dict(data)


def test_tensor_parallel_groups_divide_the_nodes_of_their_stage() -> None:
    problem = mixed("training.global_batch_size=12", "space.num_micro_batches=1", "space.pp=2")
    slow, fast = problem.cluster.groups
    problem = with_groups(problem, replace(slow, count=2, gpus=3), replace(fast, count=3, gpus=2))
    table = build_tables(problem, outer_spaces(problem)[:1])[0]
    plans = random_plans(table, 60, torch.Generator().manual_seed(0))
    plans = replace(
        plans, choices=torch.cat([plans.choices[:40], plans.choices[40:, :1].expand(-1, 7)])
    )
    cost = evaluate_batch(table, plans)
    assert evaluate_batch(table, fill(table, plans)).feasible[cost.feasible].all()
    illegal = 0
    for index in range(len(plans)):
        plan = plans.to_plan(index, table)
        gpus = [problem.cluster.arranged(plan.node_order).stage_group(k, 2).gpus for k in range(2)]
        if any(gpus[k] % s.tp for k, s in zip(plan.stage_of_layer, plan.layers, strict=True)):
            illegal += 1
            assert not cost.feasible[index]
            with pytest.raises(PlanError, match=r"tp=2, which must divide .*; try 1\."):
                evaluate(plan, problem)
        else:
            evaluate(plan, problem)
    assert 0 < illegal < len(plans)


def test_a_boundary_runs_at_the_slower_of_its_two_ends() -> None:
    problem = mixed("space.pp=4", "space.num_micro_batches=1")
    fast, slow = Link(4e10, 0.0), Link(1e9, 0.0)

    def seconds(first: Link, second: Link) -> torch.Tensor:
        groups = problem.cluster.groups
        changed = with_groups(
            problem, replace(groups[0], inter_node=first), replace(groups[1], inter_node=second)
        )
        space = next(s for s in outer_spaces(changed) if s.node_order == ())
        table = build_tables(changed, [space])[0]
        return table.p2p[0, table.boundary_kind[1]]  # from the last slow node to the first fast one

    assert torch.equal(seconds(fast, slow), seconds(slow, fast))
    assert torch.equal(seconds(fast, slow), seconds(slow, slow))
    assert (seconds(fast, fast) < seconds(fast, slow)).all()


def test_a_stage_that_mixes_node_types_is_decided_by_its_slowest_member() -> None:
    problem = mixed()
    (table,) = build_tables(problem, [s for s in outer_spaces(problem) if s.pp == 2][:1])
    plan = random_plans(table, 1, torch.Generator().manual_seed(0)).to_plan(0, table)
    torn = replace(plan, node_order=(0, 2, 1, 3))
    pure, mixes = evaluate(plan, problem), evaluate(torn, problem)
    assert mixes.iteration_time_s > pure.iteration_time_s
    slow, fast = (problem.cluster.arranged((0, 2, 1, 3)).stage_topology(k, 2) for k in (0, 1))
    assert slow.groups == fast.groups == (0, 1)
    device = problem.cluster.groups[slow.group].device
    assert device.peak_flops == min(group.device.peak_flops for group in problem.cluster.groups)
    assert mixes.capacity_bytes == (min(pure.capacity_bytes),) * 2
    with pytest.raises(PlanError, match="must name each of the 4 nodes once"):
        evaluate(replace(plan, node_order=(0, 1)), problem)


def test_a_cluster_that_no_pipeline_divides_is_refused_and_the_advice_works() -> None:
    problem = mixed("model.num_layers=2")
    slow, fast = problem.cluster.groups
    odd = with_groups(problem, replace(slow, count=7, gpus=1), replace(fast, count=1, gpus=4))
    with pytest.raises(ConfigError, match=r"must divide into equal stages .*count=8\.$"):
        outer_spaces(odd)
    assert outer_spaces(with_groups(problem, replace(slow, count=8, gpus=1), odd.cluster.groups[1]))


def test_an_alternative_in_another_order_of_the_nodes_names_it() -> None:
    problem = mixed(
        "space.pp=4", "search.num_steps=2", "search.num_restarts=4", "search.polish=false"
    )
    result = search(problem, seed=0)
    table = alternatives_table(
        Outcome(problem, result.plan, evaluate(result.plan, problem), result)
    )
    shown = list(table.columns[1].cells)
    others = [plan for _, plan in result.alternatives if plan.node_order != result.plan.node_order]
    assert others
    assert order_label(problem.cluster.arranged(others[0].node_order)) in " ".join(map(str, shown))


def test_stages_lie_in_the_order_of_the_nodes() -> None:
    problem = mixed()
    cluster = problem.cluster.arranged((2, 0, 3, 1))
    assert cluster.pipeline_ranks == (4, 5, 0, 1, 6, 7, 2, 3)
    names = [cluster.stage_group(k, 4).device.name for k in range(4)]
    assert names == ["toy_fast", "toy", "toy_fast", "toy"]
    assert Counter(a == b for a, b in pairwise(names)) == {False: 3}


def test_the_search_finds_the_optimum_of_random_mixed_clusters() -> None:
    problem = random_mixed(0)
    tables = build_tables(problem)
    best = find_layerwise_plan(tables, "layerwise").cost
    found = search_tables(tables, "layerwise", replace(problem.config.search, num_steps=60), 0)
    assert (
        best * (1.0 - 1e-9)
        <= found.iteration_time_s
        <= min(1.01 * best, found.raw_iteration_time_s)
    )
