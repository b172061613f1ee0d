"""LoRA: what frozen weights and low-rank adapters cost, and who refuses them."""

import pytest

from darts_parallel import evaluate, load_problem
from darts_parallel.cost.choices import ChoiceTensors
from darts_parallel.cost.compute import products_seconds
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.errors import UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plans.legality import refuse_unexecutable
from darts_parallel.plans.space import OuterSpace
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.problem import Problem
from tests.support.export_plans import LLAMA, plan_of

RANK = 4


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

    before, after = costs(full, strategy), costs(lora, strategy)
    assert float(after.forward) == pytest.approx(float(before.forward) + seconds(block.adapters))
    whole = float(before.terms["compute"])
    less = seconds(block.gemms) - 3.0 * seconds(block.adapters)
    # and the sum of gradients over micro-batches is that of the adapters
    summed = (
        block.sharded_parameters + block.replicated_parameters - block.adapter_parameters
    ) * 10.0
    less += summed / (device.memory_bandwidth * device.memory_efficiency)
    assert float(after.terms["compute"]) == pytest.approx(whole - less)
    assert float(after.gradient_sync) < float(before.gradient_sync)


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
    with pytest.raises(UnsupportedError, match=r"lora_rank=4 cannot run here.*try 0"):
        refuse_unexecutable(plan, problem)
    for target in ("megatron", "torchtitan", "galvatron"):
        with pytest.raises(UnsupportedError, match="lora_rank=4, and the written program"):
            export_plan(problem, plan, target)
    assert export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 2), 2), "deepspeed").files
    assert evaluate(plan, problem).mfu > 0
