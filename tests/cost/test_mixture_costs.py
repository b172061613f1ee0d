"""Costs, memory and search of mixtures of experts: invariants and published figures."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from darts_parallel import Plan, evaluate, load_problem
from darts_parallel.cost.collectives import RingGroup
from darts_parallel.cost.compute import launch_gap
from darts_parallel.cost.evaluation import hard_plan
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.table import build_tables
from darts_parallel.cost.terms.experts import (
    ExpertTerm,
    _flex_copies,
    dispatch_seconds,
    exchange_seconds,
)
from darts_parallel.errors import ConfigError, PlanError
from darts_parallel.plans._expert_degrees import expert_layer
from darts_parallel.plans.space import OuterSpace, outer_spaces
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.cluster import GIB, Link
from darts_parallel.problem.problem import Problem
from tests.support.random_plans import random_plans

TOY = ["model=toy_moe", "cluster=toy", "training=toy"]


def toy(*changes: str) -> Problem:
    return load_problem([*TOY, *changes])


def test_every_plan_of_the_space_is_legal_and_written_with_its_expert_degrees() -> None:
    problem = toy("space.etp=null", "space.pp=2", "space.num_micro_batches=4")
    (table,) = build_tables(problem)
    plans = random_plans(table, 5, torch.Generator().manual_seed(3))
    names = tuple(layer.name for layer in problem.model.layers)
    for index in range(5):
        plan = plans.to_plan(index, table)
        evaluate(plan, problem)  # refuses what is illegal
        written = plan.to_dict(names, range(8), experts=True)
        assert all(layer["ep"] * layer["etp"] in (1, 2, 4) for layer in written["layers"])
        assert Plan.from_dict(written) == plan


def uniform(problem: Problem, strategy: LayerStrategy, **plan: int) -> Plan:
    layers = len(problem.model.layers)
    return Plan(plan.get("m", 1), (0, layers), (strategy,) * layers)


@pytest.mark.parametrize(
    ("ep", "capacity", "slower"),
    [(1, "null", True), (4, "null", True), (8, "null", False), (1, "1.0", False)],
)
def test_one_expert_of_a_rank_and_padded_ones_are_products(
    ep: int, capacity: str, slower: bool
) -> None:
    given = [
        f"model.moe_expert_capacity_factor={capacity}",
        "cluster.devices.toy.grouped_gemm_efficiency=",
    ]
    seconds = [
        evaluate(uniform(problem, LayerStrategy(1, 8, ep=ep)), problem).breakdown_s["compute"]
        for problem in (toy(given[0], f"{given[1]}{share}") for share in (1.0, 0.5))
    ]
    assert (seconds[1] > seconds[0] * (1 + 1e-9)) == slower


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (LayerStrategy(1, 8, ep=3), "ep=3 and etp=1, which must divide the 8 experts"),
        (LayerStrategy(1, 8, ep=8, etp=2), "as a product, the 8 GPUs"),
        (LayerStrategy(2, 4, ep=2), "tp=2 without sequence parallelism"),
        (LayerStrategy(1, 8, zero_stage=1, shard_size=2, ep=2), "shard_size=2, which must be 0"),
    ],
)
def test_illegal_expert_degrees_are_refused(strategy: LayerStrategy, words: str) -> None:
    problem = toy()
    with pytest.raises(PlanError) as caught:
        evaluate(uniform(problem, strategy), problem)
    assert words in str(caught.value)
    assert "; try " in str(caught.value)


def test_a_dense_model_has_no_expert_degrees() -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    with pytest.raises(PlanError, match="the model has no experts; try ep=1"):
        evaluate(uniform(problem, LayerStrategy(1, 8, ep=2)), problem)
    with pytest.raises(ConfigError, match=r"space.ep=4 must be 1, since the model has no experts"):
        outer_spaces(load_problem(["model=toy", "cluster=toy", "training=toy", "space.ep=4"]))


def test_pins_of_expert_degrees() -> None:
    with pytest.raises(ConfigError, match=r"space.ep=3 must divide model.num_experts=8 .* try 2"):
        outer_spaces(toy("space.ep=3"))
    for space in outer_spaces(toy("space.ep=4", "space.etp=2")):
        assert {(choice.ep, choice.etp) for choice in space.choices} == {(4, 2)}


def seconds(problem: Problem, plan: Plan) -> float:
    return evaluate(plan, problem).iteration_time_s


def test_more_bandwidth_or_balance_is_never_slower_and_overlap_never_longer() -> None:
    def of(*changes: str) -> float:
        problem = toy(*changes)
        plan = uniform(problem, LayerStrategy(1, 8, zero_stage=1, ep=8), m=2)
        return seconds(problem, plan)

    base = of()
    assert of("cluster.inter_node.bandwidth_GBps=2") < base
    assert of("training.moe_load_imbalance=1") < base < of("training.moe_load_imbalance=1.25")
    assert of("training.overlap_moe_expert_parallel_comm=true") < base
    assert of("training.moe_shared_expert_overlap=true") < base
    # a token goes once to each of the two nodes instead of once to every expert there
    assert of("training.moe_token_dispatcher_type=flex") < base
    assert of("cluster.nvlink_domain_gpus=8") < base


def test_biases_of_experts_move_28_bytes_forward_and_40_backward_and_keep_nothing() -> None:
    problem = toy("training.moe_load_imbalance=1.25")
    topology = problem.cluster.stage_topology(0, 1)
    stage = StageContext.build(problem, topology, OuterSpace(1, (1,), (LayerStrategy(1, 8),)))
    layer = next(layer for layer in problem.model.layers if layer.experts is not None)
    assert layer.experts is not None
    plain, biased = (
        ExpertTerm().layer_cost(stage, replace(layer, experts=replace(layer.experts, bias=bias)))
        for bias in (False, True)
    )
    rows = 1.25 * stage.choices.tokens * layer.experts.top_k
    once = rows * layer.experts.hidden / stage.device.memory_bandwidth
    once = once / stage.device.memory_efficiency
    torch.testing.assert_close(biased.forward - plain.forward, 28.0 * once)
    torch.testing.assert_close(biased.backward - plain.backward, 40.0 * once)
    torch.testing.assert_close(biased.kept, plain.kept)
    # in 16 bits, as sent and as received
    torch.testing.assert_close(plain.working, 2.0 * 2.0 * rows * layer.experts.hidden)


def test_a_rank_launches_the_kernels_of_its_own_experts() -> None:
    problem = toy("cluster.devices.toy.expert_overhead_us=1000")
    topology = problem.cluster.stage_topology(0, 1)
    space = OuterSpace(1, (1,), (LayerStrategy(1, 8, ep=4),))
    stage = StageContext.build(problem, topology, space)
    layer = next(layer for layer in problem.model.layers if layer.experts is not None)
    none = torch.zeros(1, 1, dtype=torch.float64)
    found, _ = ExpertTerm().message_seconds(stage, layer, (none, none))
    sent = exchange_seconds(stage, layer)
    # half of the launches are the layer's; the other half are those of 16 experts
    launches = 1e-3 * stage.training.expert_launches * (0.5 + 0.5 * layer.experts.count / 4 / 16)
    torch.testing.assert_close(found, sent + launch_gap(sent, launches))


def test_experts_below_16_bits_launch_two_more_kernels_each_way() -> None:
    job = ["cluster.devices.toy.expert_overhead_us=1000", "training.precision=fp8"]
    problem = toy(*job, "+cluster.devices.toy.peak_TFLOPs.fp8=100")
    topology = problem.cluster.stage_topology(0, 1)
    space = OuterSpace(1, (1,), (LayerStrategy(1, 8, ep=4),))
    stage = StageContext.build(problem, topology, space)
    layer = next(layer for layer in problem.model.layers if layer.experts is not None)
    assert layer.experts is not None
    none = torch.zeros(1, 1, dtype=torch.float64)
    forward, backward = ExpertTerm().message_seconds(stage, layer, (none, none))
    sent = exchange_seconds(stage, layer)
    # 4 instead of 2 kernels an expert forward, 6 instead of 4 backward, which is twice as long
    own = 0.5 * layer.experts.count / 4 / 16
    torch.testing.assert_close(forward, sent + launch_gap(sent, 1e-3 * (0.5 + 2.0 * own)))
    torch.testing.assert_close(backward, sent + launch_gap(sent, 2e-3 * (0.5 + 1.5 * own)))


def test_a_flex_dispatcher_sends_a_token_once_to_each_domain_and_rank() -> None:
    (experts,) = {layer.experts for layer in toy().model.layers if layer.experts is not None}
    two, link = torch.tensor([2.0], dtype=torch.float64), Link(1e9, 0.0)
    inside, across = _flex_copies(experts, RingGroup(two, two, two, link, link))
    assert float(inside) == pytest.approx(experts.distinct(4) / 2)
    assert float(across) == pytest.approx(experts.distinct(2) / 2)
    assert experts.distinct(2) < experts.distinct(4)


def test_states_are_divided_by_the_ranks_that_hold_the_same_experts() -> None:
    problem = toy("cluster.devices.toy.state_factor=1")
    (spec,) = {layer.experts for layer in problem.model.layers if layer.experts is not None}

    def static(strategy: LayerStrategy) -> float:
        table, hard, _ = hard_plan(uniform(problem, strategy, m=2), problem)
        return float(table.static[0, 3, hard.choices[0, 3]])

    whole, split = (
        static(LayerStrategy(1, 8, zero_stage=0)),
        static(LayerStrategy(1, 8, zero_stage=0, ep=8)),
    )
    # bf16: 2 + 4 + 12 bytes a parameter
    assert whole - split == pytest.approx(18 * spec.parameters * 7 / 8)
    ones = [static(LayerStrategy(1, 8, zero_stage=1, ep=ep)) for ep in (1, 2, 4, 8)]
    # optimizer states of the experts are 1/8 whatever ep: dealt by ep, sharded over edp
    for (narrow, wide), ep in zip(pairwise(ones), (2, 4, 8), strict=True):
        assert narrow - wide == pytest.approx(6 * spec.parameters * (2 / ep - 1 / ep))
    assert static(LayerStrategy(1, 8, zero_stage=3, ep=2)) == pytest.approx(
        static(LayerStrategy(1, 8, zero_stage=3, ep=8))
    )


def test_recomputed_parts_keep_less_and_cost_seconds() -> None:
    kept, spent = [], []
    for modules in (
        "[core_attn]",
        "[moe_act]",
        "[moe_act,layernorm]",
        "[moe,layernorm,shared_experts,mlp]",
    ):
        problem = toy(f"training.recompute_modules={modules}")
        strategy = LayerStrategy(1, 8, recompute="selective", ep=4)
        table, _, cost = hard_plan(uniform(problem, strategy, m=2), problem)
        kept.append(float(table.activation[0, 3, 0]))
        spent.append(float(cost.iteration_time[0]))
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert spent[0] != spent[1]
    assert spent[1] < spent[2] < spent[3]


def test_deepseek_v3_keeps_the_published_bytes() -> None:
    """arXiv 2603.07685: weights and gradients, optimizer states, activations at PP4 VPP4 EP64 in BF16."""
    device = "cluster.devices.gb200"
    problem = load_problem(
        [
            "model=deepseek_v3",
            "training=deepseek_v3",
            "cluster=gb200_nvl72",
            "cluster.nodes.0.count=64",
            "training.moe_load_imbalance=1",
            f"{device}.state_factor=1",
            f"{device}.activation_factor=1",
        ]
    )
    layers = len(problem.model.layers)
    edges = (0, *(5 + 4 * i for i in range(15)), layers)
    plan = Plan(128, edges, (LayerStrategy(1, 64, 1, ep=64),) * layers, virtual_stages=4)
    table, _, _ = hard_plan(plan, problem)
    mine = [i for i, stage in enumerate(plan.stage_of_layer) if stage == 1]
    states = float(sum(table.static[0, i, 0] for i in mine))
    in_flight = table.in_flight[0]
    kept = float(sum(in_flight[plan.chunk_of_layer[i]] * table.activation[0, i, 0] for i in mine))
    # the report says GB; its parts match 16 expert layers in units of 2^30 bytes, as memory tools print
    assert states / GIB == pytest.approx(36.4 + 32.1, rel=0.02)
    assert kept / GIB == pytest.approx(131.0, rel=0.05)
    assert (states + kept) / GIB == pytest.approx(199.5, rel=0.10)
    assert (states + kept) / 1e9 == pytest.approx(199.5, rel=0.10)


@pytest.mark.parametrize(
    ("cluster", "measured"), [(("gb200_nvl72", 16), 675e-6), (("h100_8x8", 8), 4626e-6)]
)
def test_dispatch_takes_the_published_seconds(cluster: tuple[str, int], measured: float) -> None:
    """arXiv 2603.07685, table 7: ep 64 inside an NVLink domain, and over nodes of eight.

    A kernel alone reaches seven eighths of the links, and waits for no other rank; in a training step it
    is slower.
    """
    name, nodes = cluster
    device = f"cluster.devices.{name.split('_')[0]}"
    alone = [f"{device}.all_to_all_efficiency=0.7", f"{device}.flex_gain=1.25"]
    link = "cluster.nodes.0.intra_node"  # as nccl-tests measure it
    alone += [f"{link}.latency_us=3", f"{link}.efficiency=0.8"]
    problem = load_problem(
        ["model=deepseek_v3", f"cluster={name}", f"cluster.nodes.0.count={nodes}", *alone]
    )
    topology = problem.cluster.stage_topology(0, 1)
    experts = expert_layer(problem.model)
    stage = StageContext.build(
        problem, topology, OuterSpace(1, (1,), (LayerStrategy(1, 64, ep=64),))
    )
    flex, plain = (
        replace(stage, training=replace(stage.training, moe_token_dispatcher_type=kind))
        for kind in ("flex", "alltoall")
    )
    size = torch.tensor([[2.0 * 4096 * experts.hidden]], dtype=torch.float64)
    found = dispatch_seconds(flex, experts, size)
    assert float(found) == pytest.approx(measured, rel=0.12)
    # a plain all-to-all moves every copy
    assert float(dispatch_seconds(plain, experts, size)) > float(found)


def test_launches_count_where_the_kernels_are_shorter() -> None:
    kernels = torch.logspace(-5, -1, 9, dtype=torch.float64)
    both = kernels + launch_gap(kernels, 1e-3)
    longer = kernels.clamp(min=1e-3)
    assert (both >= longer).all()
    assert (both <= 2**0.5 * longer * (1 + 1e-12)).all()
    assert (launch_gap(kernels, 0.0) == 0.0).all()


def test_padded_experts_cost_what_grouped_ones_do_at_full_efficiency() -> None:
    even = ("training.moe_load_imbalance=1", "cluster.devices.toy.grouped_gemm_efficiency=1.0")
    padded, grouped = (
        evaluate(uniform(problem, LayerStrategy(1, 8)), problem).breakdown_s["compute"]
        for problem in (toy(*even, "model.moe_expert_capacity_factor=1.0"), toy(*even))
    )
    assert padded == pytest.approx(grouped, rel=1e-12)


def test_a_part_of_the_backward_pass_of_experts_is_their_weight_gradients() -> None:
    pinned = ["model.moe_ffn_hidden_size=65536", "space.pp=1", "space.tp=1", "space.ep=1"]
    pinned += ["space.recompute=none", "space.zero_stage=0"]
    few, many = (build_tables(toy(*pinned, f"model.moe_router_topk={k}"))[0] for k in (1, 2))
    layer = [spec.kind for spec in toy().model.layers].index("experts")
    forward = float((many.forward - few.forward)[0, 0, layer])
    weights = float((many.weight_gradient - few.weight_gradient)[0, 0, layer])
    assert 0.6 * forward < weights < forward  # the products, without the activation function
