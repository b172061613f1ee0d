"""Bits of collectives and hybrid sharding groups: by hand, monotone, and in the space only when listed."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from darts_parallel.config.schema import COMM_BITS
from darts_parallel.cost.collectives import (
    RingGroup,
    all_reduce,
    reduce_scatter,
    split_group,
    wire_bytes,
)
from darts_parallel.cost.evaluation import CostBreakdown, evaluate
from darts_parallel.cost.sharding import BUCKET
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.cluster import Link
from darts_parallel.problem.problem import Problem, load_problem

TOY = ["model=toy", "cluster=toy", "training=toy"]
PLAIN = [*TOY, "cluster.devices.toy.overlap_exponent=1.0"]
"""No overlap: seconds of communication add to those of computation."""
LAYERS = 7


def cost(problem: Problem, **fields: object) -> CostBreakdown:
    strategy = replace(LayerStrategy(1, 8), **fields)  # type: ignore[arg-type]
    return evaluate(Plan(2, (0, LAYERS), (strategy,) * LAYERS), problem)


def test_lossy_numbers_travel_at_their_bits_and_a_scale_for_each_block() -> None:
    bits = torch.tensor([float(b) for b in COMM_BITS], dtype=torch.float64)
    assert wire_bytes(4.0, bits).tolist() == [4.0, 8.25 / 8, 4.25 / 8, 2.25 / 8]
    assert wire_bytes(2.0, bits).tolist() == [2.0, 8.25 / 8, 4.25 / 8, 2.25 / 8]


@pytest.mark.parametrize(("local", "nodes"), [(4, 2), (8, 4), (2, 3), (1, 6)])
def test_inner_groups_fill_a_node_first_and_sizes_multiply(local: int, nodes: int) -> None:
    ranks = local * nodes
    inner = torch.tensor(
        [float(d) for d in range(1, ranks + 1) if ranks % d == 0], dtype=torch.float64
    )
    one = torch.ones_like(inner)
    link = Link(1e9, 0.0)
    group = RingGroup(local * one, nodes * one, local * one, link, link)
    near, far = split_group(group, ranks * one, inner)
    assert torch.equal(near.local * near.nodes, inner)
    assert torch.equal(near.local * near.nodes * far.local * far.nodes, ranks * one)
    assert torch.equal(near.local, torch.gcd(inner.long(), torch.tensor(local)).double())


def test_hybrid_sharding_synchronises_in_two_hops() -> None:
    problem = load_problem([*PLAIN, "model.tie_embeddings=false"])  # 2 nodes of 4
    links = problem.cluster.groups[0].intra_node, problem.cluster.inter_node
    four, two, one = (torch.tensor([x], dtype=torch.float64) for x in (4.0, 2.0, 1.0))
    node, across = RingGroup(four, one, four, *links), RingGroup(one, two, four, *links)
    hybrid = cost(problem, zero_stage=1, shard_size=4)
    total = 0.0
    assert (
        problem.model.layers[-1].parameters(256) == 0
    )  # the loss sends nothing, not even a latency
    for layer in problem.model.layers[:-1]:
        count = torch.tensor([float(layer.parameters(256))], dtype=torch.float64)
        # float32 gradients inside the node, their quarters between nodes, bf16 parameters back, in buckets
        messages = count / BUCKET
        total += float(reduce_scatter(4.0 * count, node, messages))
        total += float(all_reduce(4.0 * count / 4, across, messages))
        total += float(reduce_scatter(2.0 * count, node, messages))
    assert hybrid.breakdown_s["gradient_sync"] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_smaller_shard_groups_need_more_memory_and_the_whole_group_is_none(zero_stage: int) -> None:
    problem = load_problem(TOY)
    sizes = [cost(problem, zero_stage=zero_stage, shard_size=s).memory_bytes[0] for s in (2, 4, 8)]
    assert all(larger > smaller for larger, smaller in pairwise(sizes))
    assert cost(problem, zero_stage=zero_stage, shard_size=8) == cost(
        problem, zero_stage=zero_stage
    )


def test_a_shard_group_inside_the_node_spares_the_network_of_zero_3() -> None:
    problem = load_problem(PLAIN)
    assert cost(problem, zero_stage=3, shard_size=4).iteration_time_s < (
        cost(problem, zero_stage=3).iteration_time_s
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_fewer_gradient_bits_are_faster(zero_stage: int) -> None:
    problem = load_problem(TOY)
    times = [
        cost(problem, zero_stage=zero_stage, grad_comm_bits=b).iteration_time_s for b in COMM_BITS
    ]
    assert all(fewer < more for more, fewer in pairwise(times))


def test_tensor_parallel_bits_shorten_the_forward_sums_only() -> None:
    problem = load_problem([*PLAIN, "cluster.nodes.0.intra_node.latency_us=0.0"])
    terms = [
        cost(problem, tp=4, dp=2, tp_comm_bits=b).breakdown_s["tensor_parallel"] for b in (16, 8)
    ]
    forward = sum(layer.tp_collectives for layer in problem.model.layers)
    backward = sum(layer.tp_collectives_backward for layer in problem.model.layers)
    assert terms[1] / terms[0] == pytest.approx(
        (forward * 8.25 / 16 + backward) / (forward + backward)
    )


def choices(*overrides: str) -> set[LayerStrategy]:
    return {c for space in outer_spaces(load_problem([*TOY, *overrides])) for c in space.choices}


def test_lossy_and_hybrid_choices_enter_only_when_they_are_listed() -> None:
    assert {(c.tp_comm_bits, c.grad_comm_bits, c.shard_size) for c in choices()} == {(16, 16, 0)}
    listed = choices(
        "space.tp_comm_bits=[16,4]", "space.grad_comm_bits=null", "space.shard_size=null"
    )
    assert {c.tp_comm_bits for c in listed if c.tp > 1} == {16, 4}
    assert {c.tp_comm_bits for c in listed if c.tp == 1} == {16}
    assert {c.grad_comm_bits for c in listed if c.dp > 1} == set(COMM_BITS)
    assert {c.shard_size for c in listed if c.dp == 8 and c.zero_stage} == {0, 2, 4}
    assert all(c.zero_stage > 0 and c.dp % c.shard_size == 0 for c in listed if c.shard_size)
    assert {c.shard_size for c in choices("space.shard_size=4") if c.zero_stage} == {
        0,
        4,
    }  # dp 4: all of it


def test_a_shard_size_that_divides_no_degree_is_refused_and_the_advice_works() -> None:
    pins = ["space.zero_stage=1", "space.dp=4"]
    with pytest.raises(ConfigError, match=r"space\.shard_size=3 must be above 1 and divide.*try 0"):
        choices("space.shard_size=3", *pins)
    assert choices("space.shard_size=0", *pins)


def test_a_plan_whose_shards_do_not_divide_its_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"shard_size=3.*8 data-parallel ranks; try "):
        cost(load_problem(TOY), zero_stage=1, shard_size=3)
