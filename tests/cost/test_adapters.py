"""LoRA: what frozen weights and low-rank adapters cost, and who refuses them."""

from dataclasses import replace

import pytest
import torch

from darts_parallel import Plan, evaluate, load_problem
from darts_parallel.cost.choices import ChoiceTensors
from darts_parallel.cost.compute import products_seconds, stream_seconds, unfused_attention_seconds
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms import TERMS
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.space import OuterSpace
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.layer_spec import AttentionCore
from darts_parallel.problem.problem import Problem
from tests.support.export_plans import LLAMA, plan_of

RANK = 16


def llama(*changes: str, rank: int = RANK) -> Problem:
    return load_problem([*LLAMA, f"training.lora_rank={rank}", *changes])


def costs(problem: Problem, strategy: LayerStrategy, index: int = 1) -> LayerCosts:
    """Price one layer on all devices, one micro-batch."""
    topology = problem.cluster.stage_topology(0, 1)
    stage = StageContext.build(problem, topology, OuterSpace(1, (1,), (strategy,)))
    return layer_costs(stage, problem.model.layers[index], counts_table=True)


def test_adapters_have_the_parameters_of_the_paper() -> None:
    problem = llama()
    block = problem.model.layers[1]
    config = problem.config.model
    hidden, ffn = config.hidden_size, config.ffn_hidden_size or 0
    kv = hidden // config.num_heads * (config.num_kv_heads or 0)
    # rank x (in + out) of each product: queries, keys and values together, output, both of the gated MLP
    shapes = (hidden + hidden + 2 * kv, 2 * hidden, hidden + 2 * ffn, ffn + hidden)
    assert block.adapter_parameters + block.replicated_adapter_parameters == RANK * sum(shapes)
    assert problem.model.num_trained_parameters == config.num_layers * RANK * sum(shapes)
    assert problem.model.num_parameters == llama(rank=0).model.num_parameters
    some = llama("training.lora_targets=[linear_proj]")
    assert some.model.num_trained_parameters == config.num_layers * RANK * 2 * hidden


def test_model_flops_leave_out_the_gradients_of_frozen_weights() -> None:
    full, lora = llama(rank=0).model, llama().model
    weights = full.flops_per_token(0)
    expected = weights * 2 / 3 + 6.0 * lora.num_trained_parameters
    assert lora.flops_per_token(0) == pytest.approx(expected)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_frozen_weights_have_neither_gradient_nor_optimizer_state(zero_stage: int) -> None:
    strategy, problem = LayerStrategy(2, 4, zero_stage), llama()
    found, block = costs(problem, strategy), problem.model.layers[1]
    base = block.sharded_parameters / 2 + block.replicated_parameters
    adapters = block.adapter_parameters / 2
    shards = [4.0 if zero_stage >= stage else 1.0 for stage in (3, 2, 1)]
    # bf16: 2 bytes of each weight; 4 of a gradient and 12 of master weights and moments of a trained one
    trained = 2.0 / shards[0] + 4.0 / shards[1] + 12.0 / shards[2]
    assert float(found.static) == pytest.approx(base * 2.0 / shards[0] + adapters * trained)
    assert float(found.state) == pytest.approx(adapters * 12.0 / shards[2])


def test_backward_of_frozen_products_is_the_gradient_of_their_inputs() -> None:
    strategy, full, lora = LayerStrategy(1, 8), llama(rank=0), llama()
    block, device = lora.model.layers[1], lora.cluster.groups[0].device
    choices = ChoiceTensors.build(lora.training, (1,), (strategy,))

    def seconds(gemms):  # type: ignore[no-untyped-def]
        return float(products_seconds(gemms, choices.tokens, choices.tp, device, 2))

    # B's outputs are added, in forward 6 bytes each; backward moves 15 bytes an input and 12 an output
    config = lora.model.config
    hidden, ffn, kv = config.hidden_size, config.ffn_hidden_size or 0, 16 * 2
    inputs = float(choices.tokens) * (hidden + hidden + hidden + ffn)
    outputs = float(choices.tokens) * (hidden + 2 * kv + hidden + 2 * ffn + hidden)
    memory = device.memory_bandwidth * device.memory_efficiency
    added, back = 6.0 * outputs / memory, (15.0 * inputs + 12.0 * outputs) / memory
    before, after = costs(full, strategy), costs(lora, strategy)
    forward = float(before.forward) + seconds(block.adapters) + added
    assert float(after.forward) == pytest.approx(forward)
    whole = float(before.terms["compute"])
    less = seconds(block.gemms) - 3.0 * seconds(block.adapters) - added - back
    # and the sum of gradients over micro-batches is that of the adapters
    summed = (
        block.sharded_parameters + block.replicated_parameters - block.adapter_parameters
    ) * 10.0
    less += summed / (device.memory_bandwidth * device.memory_efficiency)
    assert float(after.terms["compute"]) == pytest.approx(whole - less)
    assert float(after.gradient_sync) < float(before.gradient_sync)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tensor_rank_streams_its_part_of_inputs_and_outputs(tp: int) -> None:
    term = next(term for term in TERMS if term.name == "adapters")
    moved = []
    for dropout in ("0.0", "0.1"):
        problem = llama(f"training.lora_dropout={dropout}")
        topology = problem.cluster.stage_topology(0, 1)
        space = OuterSpace(1, (1,), (LayerStrategy(tp, 8 // tp),))
        stage = StageContext.build(problem, topology, space)
        own = term.layer_cost(stage, problem.model.layers[1])
        # what is no product moves through device memory
        products = own.weight_gradient
        parts = torch.stack([own.forward - products, own.backward - 2 * products])
        memory = stage.device.memory_bandwidth * stage.device.memory_efficiency
        moved.append(memory * parts.flatten())
    config = problem.config.model
    hidden, ffn, kv = config.hidden_size, config.ffn_hidden_size or 0, 16 * 2
    tokens = float(stage.choices.tokens)
    # A is divided where its product is divided by rows; B always (Megatron-LM)
    inputs = tokens * (hidden + hidden / tp + hidden + ffn / tp)
    outputs = tokens / tp * ((hidden + 2 * kv) + hidden + 2 * ffn + hidden)
    assert moved[0].tolist() == pytest.approx([6.0 * outputs, 15.0 * inputs + 12.0 * outputs])
    dropped = moved[1] - moved[0]
    assert dropped[0] == pytest.approx(float(dropped[1]))
    assert float(dropped[0]) / inputs == pytest.approx(round(float(dropped[0]) / inputs))
    assert float(own.kept) / inputs == pytest.approx(round(float(own.kept) / inputs))
    assert min(float(dropped[0]), float(own.kept)) > inputs


def test_adapters_of_a_lower_rank_are_not_slower() -> None:
    strategy = LayerStrategy(1, 8)
    least, few, usual = (float(costs(llama(rank=rank), strategy).forward) for rank in (1, 8, 16))
    assert least == few <= usual


def test_dropout_is_read_written_and_kept() -> None:
    strategy, without = LayerStrategy(1, 8), llama()
    dropped = llama("training.lora_dropout=0.1")
    device, config = without.cluster.groups[0].device, without.model.config
    tokens = float(ChoiceTensors.build(without.training, (1,), (strategy,)).tokens)
    inputs = tokens * (3 * config.hidden_size + (config.ffn_hidden_size or 0))
    before, after = costs(without, strategy), costs(dropped, strategy)
    memory = device.memory_bandwidth * device.memory_efficiency
    # an input is read and written with a mask of one byte, in forward and in backward
    assert float(after.forward - before.forward) == pytest.approx(5.0 * inputs / memory)
    assert float(after.backward - before.backward) == pytest.approx(5.0 * inputs / memory)
    kept = float(after.activation - before.activation) / device.activation_factor
    assert kept == pytest.approx(3.0 * inputs)


@pytest.mark.parametrize(("bits", "held"), [(8, 1.0), (4, 0.5625)])
def test_narrow_frozen_weights_are_held_and_widened_for_each_pass(bits: int, held: float) -> None:
    strategy = LayerStrategy(1, 8)
    wide, narrow = llama(), llama(f"training.frozen_bits={bits}")
    block, device = wide.model.layers[1], wide.cluster.groups[0].device
    frozen = block.sharded_parameters + block.replicated_parameters
    before, after = costs(wide, strategy), costs(narrow, strategy)
    less = float(before.static - after.static) / device.state_factor
    assert less == pytest.approx((2.0 - held) * frozen)
    memory = device.memory_bandwidth * device.memory_efficiency
    slower = float(after.forward - before.forward)
    assert slower == pytest.approx((held + 2.0) * frozen / memory)


def test_settings_of_adapters_want_adapters() -> None:
    for key in ("lora_dropout=0.1", "frozen_bits=8"):
        with pytest.raises(ConfigError, match=f"{key} must go with training.lora_rank above 0"):
            llama(f"training.{key}", rank=0)


def test_only_what_an_adapter_or_another_kernel_reads_is_kept() -> None:
    full, some = (
        llama(rank=0).model.layers[1],
        llama("training.lora_targets=[linear_qkv]").model.layers[1],
    )
    config = llama().config.model
    # the inputs of both products of the MLP go; the adapter's RANK numbers come
    assert (
        full.replicated_activation_bytes - some.replicated_activation_bytes
        == 2 * config.hidden_size
    )
    ffn = config.ffn_hidden_size or 0
    assert full.sharded_activation_bytes - some.sharded_activation_bytes == 2 * ffn - 2 * RANK
    every = llama().model.layers[1]
    assert every.replicated_activation_bytes == full.replicated_activation_bytes


def test_what_cannot_train_adapters_refuses_them_in_a_sentence() -> None:
    problem = llama("space.pp=1")
    plan = plan_of(problem, LayerStrategy(1, 8, 3), 2)
    with pytest.raises(UnsupportedError, match=rf"lora_rank={RANK} cannot run here.*try 0"):
        refuse_unexecutable(plan, problem)
    for target in ("megatron", "torchtitan", "galvatron"):
        with pytest.raises(UnsupportedError, match=f"lora_rank={RANK}, and the written program"):
            export_plan(problem, plan, target)
    assert export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 2), 2), "deepspeed").files
    assert evaluate(plan, problem).mfu > 0


def test_unfused_attention_falls_with_the_peak_by_its_two_products() -> None:
    device = load_problem().cluster.groups[0].device
    core = AttentionCore(heads=8, kv_heads=8, head_dim=64, causal=True)
    tokens = torch.tensor([1024.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    faster = replace(device, peak_flops=2.0 * device.peak_flops)
    slow, fast = (
        float(unfused_attention_seconds(core, tokens, 512, one, own, 2)) for own in (device, faster)
    )
    kept = 64 / (64 + float(device.gemm_half_size))
    rate = float(device.half_flops * device.gemm_efficiency) * kept
    assert slow - fast == pytest.approx(4.0 * 1024 * 512 * 8 * 64 / rate / 2, rel=1e-9)
    # four passes over scores of 2 bytes without dropout, six with
    once = float(stream_seconds(torch.tensor(2.0 * 1024 * 512 * 8), device))
    assert slow - 2.0 * (slow - fast) == pytest.approx(4.0 * once, rel=1e-9)
    dropped = unfused_attention_seconds(replace(core, dropout=True), tokens, 512, one, device, 2)
    assert float(dropped) - slow == pytest.approx(2.0 * once, rel=1e-9)


def test_frozen_weights_are_gathered_in_both_passes_and_have_no_gradients_to_scatter() -> None:
    words = ["model=llama3_8b", "cluster=h100_1x8"]
    seconds = []
    for more in ([], ["training.lora_rank=16"]):
        problem = load_problem([*words, *more])
        strategy = LayerStrategy(tp=1, dp=8, zero_stage=3, recompute="full")
        layers = problem.num_layers
        plan = Plan(64, (0, layers), (strategy,) * layers)
        seconds.append(evaluate(plan, problem).breakdown_s["sharding"])
    trained, frozen = seconds
    # gathers for forward, recomputation and backward, without the scatter of gradients
    assert 0.4 * trained < frozen < trained


@pytest.mark.parametrize("tp", [1, 4])
def test_a_higher_rank_never_takes_fewer_seconds(tp: int) -> None:
    """Rank 32 was faster than rank 16: efficiencies of narrow products grew faster than the products."""
    times = []
    for rank in (1, 15, 16, 17, 31, 32, 48, 63, 64, 65, 100, 128, 255, 256, 512, 1024):
        job = ["model=llama3_8b", "cluster=h100_1x8", "gbs=64", "seq=2048"]
        problem = load_problem([*job, f"training.lora_rank={rank}"])
        layers = (LayerStrategy(tp, 8 // tp, 1),) * problem.num_layers
        plan = Plan(8 * tp, (0, problem.num_layers), layers)
        times.append(evaluate(plan, problem).iteration_time_s)
    assert times == sorted(times)
