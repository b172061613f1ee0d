"""Runs that others measured and that are not in the fit: memory of small GPUs, and a GPU without runs."""

import pytest

from darts_parallel.cost import evaluate
from darts_parallel.planner import intervals, out_of_memory, sensitivity
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import GIB, Problem, load_problem

# three Quadro RTX 6000 or eight RTX 3090: 24 GB, which its owner describes in a device file
SMALL = ["cluster=h100_1x8", "cluster.devices.h100.memory_GiB=24", "training=any"]
SMALL += ["training.precision=fp16", "training.software=deepspeed_hf"]
PYTHIA = {
    "model.gated_mlp": "false",
    "model.learned_positions": "false",
    "model.tie_embeddings": "false",
    "model.vocab_size": "50304",
    "model.max_seq_len": "2048",
    "training.seq_len": "512",
    "training.global_batch_size": "3",
    "cluster.nodes.0.gpus": "3",
}


def zero_3(problem: Problem, recompute: str) -> Plan:
    layers, ranks = problem.num_layers, problem.cluster.num_devices
    return Plan(1, (0, layers), (LayerStrategy(1, ranks, 3, recompute, False),) * layers)


@pytest.mark.parametrize("reserved", ["", "1.7"])
def test_pythia_1b_fits_on_24_gb_and_28b_runs_out(reserved: str) -> None:
    """h2oai/h2o-llmstudio PR 288: pythia-1b takes 11.5 GB on three GPUs, pythia-2.8b runs out."""
    chances = []
    words = [*SMALL, "model=gpt2_xl", *(f"{key}={value}" for key, value in PYTHIA.items())]
    if reserved:
        words.append(f"cluster.devices.h100.reserved_GiB={reserved}")
    for width, blocks, heads in ((2048, 16, 8), (2560, 32, 32)):
        sizes = [f"hidden_size={width}", f"num_layers={blocks}", f"num_heads={heads}"]
        problem = load_problem([*words, *(f"model.{size}" for size in sizes)])
        plan = zero_3(problem, "none")
        chances.append(out_of_memory(plan, problem))
        if reserved and width == 2048:
            # nvidia-smi showed 10.7 GiB
            assert evaluate(plan, problem).memory_bytes[0] / GIB == pytest.approx(10.7, rel=0.15)
    small, large = chances
    assert small is not None
    assert small < 0.05
    assert large is not None
    assert large > 0.5


def test_llama_3_8b_runs_out_on_eight_gpus_of_24_gb() -> None:
    """hiyouga/LlamaFactory#5977: ZeRO-3 of all weights in fp16 on eight RTX 3090."""
    words = [*SMALL, "model=llama3_8b", "training.global_batch_size=16", "training.seq_len=1024"]
    problem = load_problem([*words, "cluster.devices.h100.reserved_GiB=1.7"])
    chance = out_of_memory(zero_3(problem, "full"), problem)
    assert chance is not None
    assert chance > 0.9


def test_a_gpu_without_runs_is_as_unsure_in_8_bits_as_it_was_off() -> None:
    """ROCm/TransformerEngine#72: 175 TFLOP/s on MI300X, where its peak suggests 2.8 times that."""
    words = ["model=gpt2_xl", "cluster.nodes.0.gpus=1", "training.precision=fp8", "training=any"]
    words += ["training.seq_len=1024", "training.global_batch_size=14"]
    widths = []
    for cluster in ("h100_1x8", "mi300x_1x8"):
        problem = load_problem([*words, f"cluster={cluster}"])
        layers = (LayerStrategy(1, 1, 0, "none", False),) * problem.num_layers
        plan = Plan(1, (0, problem.num_layers), layers)
        sure = intervals(plan, problem, evaluate(plan, problem), sensitivity(plan, problem))
        assert sure is not None
        widths.append(float(sure.label().split()[1]))
    measured, unmeasured = widths
    assert measured < 50
    assert 100 < unmeasured < 200
