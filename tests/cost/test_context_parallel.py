"""Context parallelism: what it divides, what it sends, where it is legal."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from darts_parallel.cost.collectives import RingGroup, reduce_scatter
from darts_parallel.cost.evaluation import CostBreakdown, evaluate
from darts_parallel.errors import PlanError
from darts_parallel.plans.space import outer_spaces
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.problem import Problem, load_problem

TOY = ["model=toy", "cluster=toy", "training=toy"]
PLAIN = [*TOY, "cluster.devices.toy.overlap_exponent=1.0"]
"""No overlap: seconds of communication add to those of computation."""
LAYERS = 7


def cost(problem: Problem, cp: int, **fields: object) -> CostBreakdown:
    strategy = LayerStrategy(**({"tp": 1, "dp": 8 // cp} | fields))  # type: ignore[arg-type]
    return evaluate(Plan(2, (0, LAYERS), (strategy,) * LAYERS, cp=cp), problem)


@pytest.mark.parametrize(("cp", "zero_stage"), list(product((2, 4), (0, 1, 2, 3))))
def test_a_context_rank_differs_from_a_data_rank_by_its_keys_and_values(
    cp: int, zero_stage: int
) -> None:
    # the same tokens on a rank, the same copies of the weights: only attention must communicate
    problem = load_problem(PLAIN)
    plain, parted = (
        cost(problem, 1, zero_stage=zero_stage),
        cost(problem, cp, zero_stage=zero_stage),
    )
    sent = parted.breakdown_s.pop("context_parallel")
    assert sent > 0
    assert parted.breakdown_s == pytest.approx(plain.breakdown_s, rel=1e-9, abs=1e-15)
    assert parted.iteration_time_s == pytest.approx(plain.iteration_time_s + sent, rel=1e-9)


def test_keys_and_values_are_gathered_once_forward_and_twice_backward() -> None:
    problem = load_problem(PLAIN)  # 16 sequences of 64 tokens, hidden size 64, 4 blocks
    group, inter = problem.cluster.groups[0], problem.cluster.inter_node
    tokens = 16 * 64 / (2 * 2)  # two micro-batches, dp 2: of all four context ranks
    four, one = (torch.tensor([x], dtype=torch.float64) for x in (4.0, 1.0))
    whole = 2 * 2 * 64 * tokens * one  # keys and values in bf16
    gather = float(reduce_scatter(whole, RingGroup(four, one, four, group.intra_node, inter)))
    assert cost(problem, 4).breakdown_s["context_parallel"] == pytest.approx(
        2 * 4 * 3 * gather, rel=1e-9
    )


def test_fewer_key_value_heads_send_less_and_recomputation_sends_again() -> None:
    free = [*PLAIN, "cluster.nodes.0.intra_node.latency_us=0.0"]
    full = cost(load_problem(free), 4).breakdown_s["context_parallel"]
    grouped = cost(load_problem([*free, "model.num_kv_heads=1"]), 4).breakdown_s["context_parallel"]
    assert grouped == pytest.approx(full / 4)
    for recompute in ("selective", "full"):
        again = cost(load_problem(free), 4, recompute=recompute).breakdown_s["context_parallel"]
        assert again == pytest.approx(full * 4 / 3)


def test_attention_hides_a_part_of_the_transfer() -> None:
    hidden = cost(load_problem([*TOY, "cluster.devices.toy.overlap_exponent=4.0"]), 4)
    assert (
        0
        < hidden.breakdown_s["context_parallel"]
        < cost(load_problem(PLAIN), 4).breakdown_s["context_parallel"]
    )


def test_one_sequence_is_divided_where_data_parallelism_cannot_and_its_memory_with_it() -> None:
    long = ["training.global_batch_size=1", "model.max_seq_len=4096", "training.seq_len=4096"]
    problem = load_problem([*TOY, *long, "cluster.nodes.0.count=1"])  # 4 devices
    with pytest.raises(PlanError, match="must divide"):
        evaluate(Plan(1, (0, LAYERS), (LayerStrategy(1, 4),) * LAYERS), problem)
    stages = evaluate(Plan(1, (0, 2, 3, 4, LAYERS), (LayerStrategy(1, 1),) * LAYERS), problem)
    parted = evaluate(Plan(1, (0, LAYERS), (LayerStrategy(1, 1),) * LAYERS, cp=4), problem)
    reserved = problem.cluster.groups[0].device.reserved
    assert parted.memory_bytes[0] - reserved < sum(m - reserved for m in stages.memory_bytes)


@pytest.mark.parametrize(("cp", "near"), [(3, 2), (16, 8)])
def test_an_illegal_degree_is_refused_and_the_nearest_one_works(cp: int, near: int) -> None:
    with pytest.raises(PlanError, match=rf"cp={cp} must divide.*try {near}\.$"):
        cost(load_problem(TOY), cp, dp=1)


def test_a_sequence_that_cannot_be_halved_is_divided_only_without_a_causal_mask() -> None:
    odd = [*TOY, "training.seq_len=36", "space.cp=null"]
    assert {s.cp for s in outer_spaces(load_problem(odd))} == {1, 2}
    assert {s.cp for s in outer_spaces(load_problem([*odd, "model.causal=false"]))} == {1, 2, 4}


def test_tensor_parallel_groups_wider_than_a_node_of_four_are_priced_and_searched_up_to_eight() -> (
    None
):
    wide = [*PLAIN, "model.num_heads=8"]
    problem = load_problem(wide)  # 2 nodes of 4
    group, inter = problem.cluster.groups[0], problem.cluster.inter_node
    assert {c.tp for space in outer_spaces(problem) for c in space.choices} == {1, 2, 4, 8}
    assert {c.tp for s in outer_spaces(load_problem([*wide, "space.tp=8"])) for c in s.choices} == {
        8
    }
    strategy = LayerStrategy(8, 1)
    found = evaluate(Plan(2, (0, LAYERS), (strategy,) * LAYERS), problem).breakdown_s[
        "tensor_parallel"
    ]
    four, two = (torch.tensor([x], dtype=torch.float64) for x in (4.0, 2.0))
    size = 2 * 64 * (16 * 64 / 2) * torch.ones(1, dtype=torch.float64)
    per_iteration = 2 * float(
        reduce_scatter(size, RingGroup(four, two, four, group.intra_node, inter))
    )
    count = sum(
        layer.tp_collectives + layer.tp_collectives_backward for layer in problem.model.layers
    )
    assert found == pytest.approx(2 * count * per_iteration, rel=1e-9)


def test_a_context_group_that_leaves_a_node_takes_the_nodes_own_link() -> None:
    problem = load_problem([*PLAIN, "cluster.nodes.0.gpus=1", "cluster.nodes.0.count=8"])
    (group,) = problem.cluster.groups
    slow = replace(problem.cluster.inter_node, bandwidth=problem.cluster.inter_node.bandwidth / 100)
    own = replace(problem.cluster, groups=(replace(group, inter_node=slow),))
    everywhere = replace(problem.cluster, inter_node=slow)
    clusters = (problem.cluster, own, everywhere)
    times = [cost(replace(problem, cluster=cluster), 4).iteration_time_s for cluster in clusters]
    assert times[1] == pytest.approx(times[2], rel=1e-12)
    assert times[1] > 2 * times[0]
