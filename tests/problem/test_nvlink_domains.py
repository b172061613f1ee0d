"""NVLink domains of several nodes: who is inside, what a job takes of a rack, and what it is worth."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.table import build_tables
from darts_parallel.plans.space import outer_spaces
from darts_parallel.problem.cluster import domain_nodes
from darts_parallel.problem.problem import Problem, load_problem
from tests.support.random_plans import random_plans

RACK = ["model=toy", "training=toy", "cluster=gb200_nvl72", "training.global_batch_size=64"]


def _problem(*overrides: str) -> Problem:
    return load_problem([*RACK, *overrides])


@pytest.mark.parametrize(
    ("nodes", "most", "taken"),
    [(1, 18, 1), (16, 18, 16), (18, 18, 18), (32, 18, 16), (64, 18, 16), (19, 18, 18), (8, 1, 1)],
)
def test_a_job_takes_equally_many_nodes_of_few_domains(nodes: int, most: int, taken: int) -> None:
    assert domain_nodes(nodes, most) == taken


def test_a_stage_inside_one_domain_crosses_no_network_whatever_its_nodes() -> None:
    cluster = _problem().cluster
    stage = cluster.stage_topology(0, 1)
    assert stage.counts == (4,) * 16
    assert (stage.domains, stage.gpus_per_domain) == ((64,), 64)
    assert stage.tensor_parallel(32) == (32, 1)
    assert stage.data_parallel(4) == (16, 1)
    assert cluster.boundary_topology(0, 4).inside_node
    assert cluster.one_domain


def test_racks_are_joined_by_the_network() -> None:
    cluster = _problem("cluster.nodes.0.count=32").cluster
    stage = cluster.stage_topology(0, 1)
    assert stage.domains == (64, 64)
    assert stage.data_parallel(1) == (64, 2)
    assert cluster.boundary_topology(0, 4).inside_node
    assert not cluster.boundary_topology(1, 4).inside_node


def test_a_domain_is_never_slower_than_its_nodes_alone_and_equals_them_at_one_node() -> None:
    # without latencies: a flat ring of 64 has more steps than rings of 4 and 16
    still = ["cluster.nodes.0.intra_node.latency_us=0", "cluster.inter_node.latency_us=0"]
    fused_to_previous, apart, one = (
        _problem(*still, f"cluster.nvlink_domain_gpus={own}") for own in (72, "null", 4)
    )
    space = next(space for space in outer_spaces(fused_to_previous) if space.pp == 2)
    tables = [build_tables(problem, [space])[0] for problem in (fused_to_previous, apart, one)]
    plans = random_plans(tables[0], 40, torch.Generator().manual_seed(3))
    seconds = [evaluate_batch(table, plans).iteration_time for table in tables]
    assert (seconds[0] <= seconds[1] * (1 + 1e-12)).all()
    assert (seconds[0] < seconds[1]).any()
    assert torch.equal(seconds[1], seconds[2])


def test_a_node_group_may_have_a_domain_of_its_own() -> None:
    group = _problem("cluster.nodes.0.nvlink_domain_gpus=8").cluster.groups[0]
    assert group.domain_nodes == 2
    assert replace(group, count=3).node == group.node


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_narrow_precisions_are_not_slower_than_16_bits(precision: str) -> None:
    overrides = [
        "cluster=gb300_nvl72",
        "model=llama3_8b",
        "training=llama3_8b",
        "space.pp=1",
        "space.tp=1",
    ]
    wide = load_problem(overrides)
    narrow = load_problem([*overrides, f"training.precision={precision}"])
    space = outer_spaces(wide)[0]
    faster, slower = (
        build_tables(problem, [space])[0].time.sum(2).amin() for problem in (narrow, wide)
    )
    assert faster < slower
