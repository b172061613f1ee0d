"""Facts of frameworks: DeepSpeed's buffers, Hugging Face's loss, and what XLA does not repeat."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from darts_parallel.cost import evaluate, hard_plan, state_bytes
from darts_parallel.cost.compute import gemm_seconds
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Problem, load_problem


def job(model: str) -> tuple[Problem, Plan]:
    problem = load_problem([f"model={model}", "cluster=toy", f"training={model}"])
    ranks = problem.cluster.num_devices
    layers = (LayerStrategy(1, ranks, 3, "none", False),) * problem.num_layers
    return problem, Plan(1, (0, problem.num_layers), layers)


def with_fact(problem: Problem, **fact: Any) -> Problem:
    return replace(problem, software=replace(problem.software, **fact))


def test_buffers_hold_whole_parameters_up_to_their_size() -> None:
    problem, plan = job("toy")
    factor = float(problem.cluster.groups[0].device.state_factor)
    bare = evaluate(plan, problem).memory_bytes[0]
    whole = problem.model.num_parameters
    for size, held in ((1e12, whole), (whole / 4, whole / 4)):
        found = evaluate(plan, with_fact(problem, buffered_parameters=size)).memory_bytes[0]
        assert found - bare == pytest.approx(2.0 * held * factor, rel=1e-6)


def test_a_step_of_zero_3_copies_the_gradients_of_a_sub_group() -> None:
    problem, plan = job("toy")
    table = hard_plan(plan, problem)[0]
    bare = table.activation[0, :, 0]
    state = state_bytes(problem.training.precision, problem.training.optimizer)
    held = state.parameter + state.gradient + state.optimizer
    ranks, whole = problem.cluster.num_devices, problem.model.num_parameters
    for size, share in ((1e12, 1.0), (whole / ranks / 4, 0.25)):
        fact = with_fact(problem, sub_group_parameters=size)
        found = hard_plan(plan, fact)[0].activation[0, :, 0]
        # the step begins when backward has freed what a layer kept
        copied = 6.0 * share * table.static[0, :, 0] / held
        assert torch.allclose(found, torch.maximum(bare, copied), rtol=1e-9)
        assert bool((copied > bare).any()) == (share == 1.0)
        divided = replace(plan, layers=tuple(replace(s, zero_stage=2) for s in plan.layers))
        assert evaluate(divided, fact) == evaluate(divided, problem)


@pytest.mark.parametrize("zero_stage", range(4))
def test_one_ring_between_nodes_slows_zero_3_alone(zero_stage: int) -> None:
    problem, plan = job("toy")
    plan = replace(plan, layers=tuple(replace(s, zero_stage=zero_stage) for s in plan.layers))
    usual = evaluate(plan, problem).iteration_time_s
    ring = evaluate(plan, with_fact(problem, single_ring=True)).iteration_time_s
    assert ring > 1.01 * usual if zero_stage == 3 else ring == usual


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_logits_of_hugging_face_fill_the_gpu_at_four_context_ranks(zero_stage: int) -> None:
    """InternLM/xtuner#755: 4 ranks a sequence of 131,072 tokens ran out of 80 GB, 8 ran."""
    qwen2_7b = {"num_layers": 28, "hidden_size": 3584, "num_heads": 28, "num_kv_heads": 4}
    qwen2_7b |= {"ffn_hidden_size": 18944, "vocab_size": 152064, "max_seq_len": 131072}
    words = ["model=llama3_8b", *(f"model.{key}={value}" for key, value in qwen2_7b.items())]
    words += ["training.seq_len=131072", "training.global_batch_size=8"]
    problem = load_problem([*words, "cluster=h100_1x8", "trainer=accelerate"])
    layers = problem.num_layers
    for cp in (4, 8):
        strategy = LayerStrategy(1, 8 // cp, zero_stage, "full")
        plan = Plan(cp, (0, layers), (strategy,) * layers, cp)
        assert evaluate(plan, problem).feasible == (cp == 8)
        # the average framework keeps 6 bytes a logit
        assert evaluate(plan, with_fact(problem, loss_bytes=6.0)).feasible


def test_processors_of_the_node_update_what_deepspeed_offloads() -> None:
    words = ["model=toy", "cluster=toy", "training=toy", "space.offload={optimizer: 1.0}"]
    problem = load_problem([*words, "cluster.devices.toy.host_bandwidth_GBps=1"])
    plan = replace(job("toy")[1], offload=((0.0, 1.0),))
    device, group = problem.cluster.groups[0].device, problem.cluster.groups[0]
    seconds = {}
    for update in (0.0, 1e-9, 1e-6):
        fact = with_fact(problem, host_update_s=update)
        seconds[update] = evaluate(plan, fact).iteration_time_s
    owned = problem.model.num_parameters / problem.cluster.num_devices
    owned *= float(device.state_factor)
    slower = seconds[1e-6] - seconds[1e-9]
    assert slower == pytest.approx(owned * group.gpus * (1e-6 - 1e-9), rel=1e-6)
    # the weights alone come back: 2 bytes instead of Adam's 12
    saved = seconds[0.0] - (seconds[1e-9] - 1e-9 * owned * group.gpus)
    assert saved == pytest.approx(10.0 * owned / float(device.host_bandwidth), rel=1e-6)


def test_each_matrix_of_an_expert_is_gathered_by_itself() -> None:
    problem, plan = job("toy_moe")
    bare = evaluate(plan, problem).iteration_time_s
    slow = evaluate(plan, with_fact(problem, module_gather_ms=1e3)).iteration_time_s
    experts = [layer.experts for layer in problem.model.layers if layer.experts]
    matrices = sum(own.count * (1 + own.inputs / own.width) for own in experts)
    # gathered in forward and in backward, and a second hides nothing that counts
    assert slow - bare == pytest.approx(2.0 * matrices, rel=0.01)


@pytest.mark.parametrize("modules", [None, ["mlp"]])
def test_xla_does_not_repeat_the_last_product_of_an_mlp(modules: list[str] | None) -> None:
    problem, plan = job("toy")
    kind = "selective" if modules else "full"
    if modules:
        training = replace(problem.training, recompute_modules=modules)
        problem = replace(problem, training=training)
    strategy = LayerStrategy(1, problem.cluster.num_devices, 0, kind, False)
    plan = replace(plan, layers=(strategy,) * problem.num_layers)

    def repeated(own: Problem) -> float:
        return evaluate(plan, own).breakdown_s["recompute"]

    gemm = next(g for g in problem.model.layers[1].gemms if g.module == "linear_fc2")
    tokens = problem.training.global_batch_size * problem.training.seq_len
    rows = torch.tensor(tokens / problem.cluster.num_devices, dtype=torch.float64)
    device = problem.cluster.groups[0].device
    product = float(gemm_seconds(gemm, rows, torch.tensor(1.0), device, 2))
    blocks = sum(layer.recomputable for layer in problem.model.layers)
    pruned = repeated(with_fact(problem, prunes_recomputation=True))
    assert repeated(problem) - pruned == pytest.approx(blocks * product, rel=1e-6)


@pytest.mark.parametrize(("tp", "owners"), [(1, 2), (2, 1)])
def test_each_owner_of_a_stage_broadcasts_unless_it_is_alone(tp: int, owners: int) -> None:
    problem = load_problem(["model=toy", "cluster=toy", "training=toy"])
    strategy = LayerStrategy(tp, 8 // (4 * tp), 1, "none", False)
    layers = problem.num_layers
    plan = Plan(2, (0, 2, 4, 5, layers), (strategy,) * layers)
    short, long = (
        evaluate(plan, with_fact(problem, owner_broadcast_ms=ms)).breakdown_s["gradient_sync"]
        for ms in (1e-9, 2.7)
    )
    # a broadcast is of an even stage; the one that ends last has two blocks
    held = sum(layer.parameters(0) for layer in problem.model.layers[2:4])
    share = 4 * held / problem.model.num_parameters
    expected = (owners > 1) * owners * 2.7e-3 * share
    assert long - short == pytest.approx(expected, rel=0.05)
