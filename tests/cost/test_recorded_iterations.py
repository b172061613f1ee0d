"""Whole iterations as one CUDA graph, and attention in 8 bits."""

import pytest
import torch

from darts_parallel import load_problem
from darts_parallel.cost.choices import ChoiceTensors
from darts_parallel.cost.compute import CAST_BYTES, fused_attention_seconds, stream_seconds
from darts_parallel.cost.layer_costs import LayerCosts, layer_costs
from darts_parallel.cost.stage_context import StageContext
from darts_parallel.cost.terms._term import Contribution
from darts_parallel.cost.terms.experts import USUAL_LOCAL, ExpertTerm
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.export import export_plan
from darts_parallel.plans.space import OuterSpace
from darts_parallel.plans.strategy import LayerStrategy
from darts_parallel.problem.layer_spec import Experts
from darts_parallel.problem.problem import Problem
from darts_parallel.report.explanation import explain
from tests.support.export_plans import MIXTURE, plan_of

SLOW = [
    "cluster.devices.toy.layer_overhead_us=1000",
    "cluster.devices.toy.expert_overhead_us=100000",
]
MX = [
    "training.precision=mxfp8",
    "+cluster.devices.toy.peak_TFLOPs.fp8=100",
    "+cluster.devices.toy.peak_TFLOPs.mxfp8=100",
]
EIGHT = ["training.precision=fp8", "+cluster.devices.toy.peak_TFLOPs.fp8=100"]

FREE = ["cluster.devices.toy.layer_overhead_us=0"]


def costs(problem: Problem) -> LayerCosts:
    topology = problem.cluster.stage_topology(0, 1)
    stage = StageContext.build(problem, topology, OuterSpace(1, (1,), (LayerStrategy(1, 8),)))
    return layer_costs(stage, problem.model.layers[1], counts_table=True)


def test_a_recorded_iteration_pays_no_launch() -> None:
    launched, recorded = (
        load_problem([*MIXTURE, *SLOW, f"training.cuda_graphs={kind}"])
        for kind in ("none", "full_iteration")
    )
    without = load_problem(
        [
            *MIXTURE,
            "cluster.devices.toy.layer_overhead_us=0",
            "cluster.devices.toy.expert_overhead_us=0",
        ]
    )
    assert float(costs(recorded).forward) == float(costs(without).forward)
    assert float(costs(recorded).backward) == float(costs(without).backward)
    # graphs of single layers leave out the routed experts
    layers = load_problem([*MIXTURE, *SLOW, "training.cuda_graphs=per_layer"])
    free = load_problem([*MIXTURE, *SLOW, *FREE])
    assert float(costs(layers).forward) == float(costs(free).forward)
    # longer launches than kernels: the layer waits for them
    assert float(costs(launched).forward) > 0.1 * (1 + 4 / USUAL_LOCAL) / 2
    plan = plan_of(recorded, LayerStrategy(1, 8), 2)
    lines = explain(recorded, plan).micro_batch
    assert sum(line.value for line in lines if line.term == "launch overhead") == 0.0


def test_recorded_experts_in_mxfp8_apply_the_activation_and_cast_in_the_first_product() -> None:
    """A recorded iteration drops a pass over the activations and the cast of the second product's rows."""

    def of(graphs: str, *changes: str) -> tuple[Contribution, StageContext, Experts]:
        job = [*MIXTURE, *MX, *changes, f"training.cuda_graphs={graphs}"]
        problem = load_problem(job)
        topology = problem.cluster.stage_topology(0, 1)
        choice = LayerStrategy(1, 8, ep=4)
        stage = StageContext.build(problem, topology, OuterSpace(1, (1,), (choice,)))
        layer = next(layer for layer in problem.model.layers if layer.experts is not None)
        assert layer.experts is not None
        return ExpertTerm().layer_cost(stage, layer), stage, layer.experts

    apart, stage, experts = of("per_layer")
    fused = of("full_iteration")[0]
    rows = 1.1 * stage.choices.tokens * experts.top_k
    once = stream_seconds(2.0 * rows * (experts.inputs + experts.width), stage.device)
    cast = stream_seconds(CAST_BYTES * rows * experts.width, stage.device)
    saved = stage.device.streaming_factor * once + cast
    torch.testing.assert_close(apart.forward - fused.forward, saved)
    torch.testing.assert_close(apart.backward - fused.backward, 2.0 * saved)
    # padded experts need no such kernel, and only that of 8-bit blocks exists
    for change in ("model.moe_expert_capacity_factor=1", "training.precision=fp8"):
        both = [float(of(graphs, change)[0].forward) for graphs in ("per_layer", "full_iteration")]
        assert both[0] == both[1]


def test_attention_in_8_bits_runs_at_the_8_bit_peak() -> None:
    sixteen, eight = (
        load_problem([*MIXTURE, *EIGHT, *FREE, f"training.fp8_dot_product_attention={flag}"])
        for flag in ("false", "true")
    )
    device, core = eight.cluster.groups[0].device, eight.model.layers[1].cores[0]
    choices = ChoiceTensors.build(eight.training, (1,), (LayerStrategy(1, 8),))
    # forward once, and two and a half times in backward
    saved = float(costs(sixteen).terms["compute"]) - float(costs(eight).terms["compute"])
    own = [
        float(
            fused_attention_seconds(
                core, choices.tokens, eight.training.seq_len, choices.tp, device, flag
            )
        )
        for flag in (False, True)
    ]
    assert saved == pytest.approx(3.5 * (own[0] - own[1]))
    assert own[0] / own[1] == pytest.approx(
        device.peak_flops * device.fp8_efficiency / device.half_flops
    )


def test_what_no_file_turns_on_is_refused_in_a_sentence() -> None:
    problem = load_problem([*MIXTURE, "training.cuda_graphs=full_iteration"])
    with pytest.raises(
        UnsupportedError, match=r"cuda_graphs=full_iteration, and no written .*cuda_graphs=none"
    ):
        export_plan(problem, plan_of(problem, LayerStrategy(1, 8, 2), 2), "deepspeed")
    with pytest.raises(
        ConfigError, match=r"must go with precision fp8, mxfp8 or nvfp4.*; try false"
    ):
        load_problem([*MIXTURE, "training.fp8_dot_product_attention=true"])
    with pytest.raises(ConfigError, match=r"cuda_graphs=all must be one of none, per_layer"):
        load_problem([*MIXTURE, "training.cuda_graphs=all"])
