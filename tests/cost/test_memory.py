from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from darts_parallel.config.model import ModelConfig
from darts_parallel.cost.activations import activation_bytes, between_passes, mlp_bytes
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.cost.memory import StateBytes, gathered_bytes, state_bytes, static_bytes
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem.layer_spec import LayerSpec
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem
from darts_parallel.problem.software import Software
from tests.support.export_plans import LLAMA

H, HEADS, S, B = 256, 8, 128, 2
LOSSES = ("full", "fused")


def _config() -> ModelConfig:
    return ModelConfig(
        name="x", num_layers=1, hidden_size=H, num_heads=HEADS, vocab_size=512, max_seq_len=S
    )


def _block(fused: bool) -> LayerSpec:
    return Model(_config(), fused).layers[1]


def _stage(tokens: Tensor, tp: Tensor, shards: Tensor, **habits: Any) -> Any:
    """Return what activations read of a stage: 16-bit numbers, attention recomputed selectively."""
    choices = SimpleNamespace(tokens=tokens, tp=tp, sequence_shards=shards)
    training = SimpleNamespace(seq_len=S, recompute_modules=["core_attn"])
    software = Software(**habits)
    return SimpleNamespace(choices=choices, training=training, software=software, width=2)


def _bytes(fused: bool, tp: int, sequence_parallel: bool) -> dict[str, float]:
    tokens = torch.tensor([[float(S * B)]], dtype=torch.float64)
    degree = torch.tensor([float(tp)], dtype=torch.float64)
    shards = degree if sequence_parallel else torch.ones_like(degree)
    stored = activation_bytes(_stage(tokens, degree, shards), _block(fused))
    return {kind: float(size) for kind, size in stored.items()}


def _score_bytes(software: str, **changes: Any) -> float:
    """Return what the scores of unfused attention add to a block, per head and pair of tokens."""
    settings = [*LLAMA, f"training.software={software}"]
    settings += [f"model.{key}={value}" for key, value in changes.items()]
    kept = []
    for kernel in ("unfused", "fa2"):
        problem = load_problem([*settings, f"training.attention_kernel={kernel}"])
        tokens = torch.full((1, 1), float(problem.training.seq_len), dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        stage = _stage(tokens, one, one)
        stage.training.seq_len = problem.training.seq_len
        stage.software = problem.software
        kept.append(float(activation_bytes(stage, problem.model.layers[1])["none"]))
    pairs = problem.training.seq_len**2
    return (kept[0] - kept[1]) / (problem.config.model.num_heads * pairs)


def test_scores_are_kept_once_without_dropout_and_in_float32_too_where_blocks_are_eager() -> None:
    # PyTorch returns the tensor that a dropout of 0 reads; with dropout: softmax, mask and output
    assert _score_bytes("megatron_core", dropout="false") == pytest.approx(2.0)
    assert _score_bytes("megatron_core", dropout="true") == pytest.approx(5.0)
    # transformers' eager Llama: a softmax in float32, and its copy in 16 bits
    assert _score_bytes("hf", dropout="false") == pytest.approx(6.0)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activations_are_those_of_korthikanti(tp: int) -> None:
    sbh, scores = S * B * H, 5 * HEADS * S / H
    # arXiv 2205.05198: equation 2, equation 4, table 2 (selective), and full recomputation
    assert _bytes(False, tp, False)["none"] == pytest.approx(sbh * (10 + 24 / tp + scores / tp))
    assert _bytes(False, tp, True)["none"] == pytest.approx(sbh * (34 + scores) / tp)
    assert _bytes(False, tp, True)["selective"] == pytest.approx(34 * sbh / tp)
    assert _bytes(False, tp, False)["full"] == pytest.approx(2 * sbh)
    assert _bytes(True, tp, True)["none"] == pytest.approx(34 * sbh / tp)


def test_frameworks_keep_gathered_inputs_gates_and_float32_logits_and_need_room_for_the_step() -> (
    None
):
    ffn, vocab, tp, one = 1024, 512, torch.tensor([4.0]), torch.ones(1, 1)
    config = replace(_config(), vocab_size=vocab, ffn_hidden_size=ffn, gated_mlp=True)
    _, block, head, loss = Model(config, True).layers

    def more(layer: LayerSpec, sequence_shards: Tensor = tp, **habits: Any) -> float:
        usual = activation_bytes(_stage(one, tp, sequence_shards), layer)["none"]
        changed = activation_bytes(_stage(one, tp, sequence_shards, **habits), layer)["none"]
        return float(changed - usual)

    assert (
        more(block, gathered_inputs=True)
        == 2 * more(head, gathered_inputs=True)
        == 2 * 2 * H * 3 / 4
    )
    assert more(block, torch.ones(1), gathered_inputs=True) == 0
    assert more(block, gate_kept=True) == 2 * ffn / 4
    divided = _stage(one, tp, torch.ones(1), partitioned_checkpoints=True)
    assert activation_bytes(divided, block)["full"] == 2 * H / 4
    assert more(loss, loss_bytes=10) == 4 * vocab / 4
    bytes_of = partial(
        static_bytes, one, 2 * one, state=state_bytes("bf16", "adam", Software(step_bytes=12))
    )
    assert [float(bytes_of(zero_stage=stage * one)) for stage in (0, 1)] == [30, 18]


def test_between_its_two_backward_passes_a_block_holds_what_is_needed_and_never_more_than_it_ever_had() -> (
    None
):
    needed, whole, kept = (
        torch.tensor([[[value]]], dtype=torch.float64) for value in (32.0, 34.0, 2.0)
    )
    assert float(between_passes(_block(True), needed, whole, kept)) == 32.0
    assert float(between_passes(_block(True), 40.0 * needed, whole, kept)) == 34.0
    assert float(between_passes(_block(True), needed, whole, whole)) == 34.0
    assert float(between_passes(replace(_block(True), frozen=True), needed, whole, kept)) == 2.0


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_states_are_those_of_the_zero_paper(zero_stage: int, bytes_per_parameter: float) -> None:
    # arXiv 1910.02054, figure 1: 2 + 2 + 12 bytes with fp16 and Adam
    parameters = torch.tensor([1000.0], dtype=torch.float64)
    dp, zero = (
        torch.tensor([8.0], dtype=torch.float64),
        torch.tensor([float(zero_stage)], dtype=torch.float64),
    )
    size = static_bytes(parameters, dp, zero, state_bytes("fp16", "adam"))
    assert float(size) == pytest.approx(1000 * bytes_per_parameter)


@pytest.mark.parametrize(
    ("precision", "optimizer", "software", "wanted"),
    [
        ("fp32", "adam", {}, (4.0, 4.0, 8.0, 0.0, 0.0)),
        ("fp32", "sgd", {"gradient_copy": True, "step_bytes": 4.0}, (4.0, 4.0, 4.0, 0.0, 0.0)),
        ("fp16", "adam", {}, (2.0, 2.0, 12.0, 0.0, 0.0)),
        ("fp16", "adam", {"gradient_copy": True}, (2.0, 2.0, 12.0, 0.0, 0.0)),
        ("bf16", "lion", {}, (2.0, 4.0, 8.0, 0.0, 0.0)),
        ("bf16", "adam", {"gradient_copy": True}, (2.0, 4.0, 12.0, 2.0, 0.0)),
        ("bf16", "adam", {"gradient_bits": 16, "gradient_copy": True}, (2.0, 2.0, 12.0, 0.0, 0.0)),
        ("fp8", "adafactor", {"step_bytes": 4.0}, (2.0, 4.0, 4.0, 0.0, 4.0)),
    ],
)
def test_states_have_the_width_of_their_precision_and_framework(
    precision: str, optimizer: str, software: dict[str, Any], wanted: tuple[float, ...]
) -> None:
    assert state_bytes(precision, optimizer, Software(**software)) == StateBytes(*wanted)


def test_zero_gathers_gradients_from_stage_2_and_parameters_at_stage_3() -> None:
    state = StateBytes(parameter=2.0, gradient=4.0, optimizer=12.0)
    stages = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert gathered_bytes(torch.tensor(10.0), stages, state).tolist() == [0.0, 0.0, 40.0, 60.0]


@pytest.mark.parametrize("software", ["null", "megatron_core", "torchtitan"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_narrow_copies_of_weights_lie_next_to_them(zero: int, software: str) -> None:
    """Two bytes a weight of all blocks; of the gathered block under ZeRO-3 by PyTorch's FSDP2.

    ROCm/TransformerEngine#79: 8B under FSDP takes more memory in fp8 than in bf16.
    """
    freed = zero == 3 and software == "torchtitan"
    copies = 2.0 / 4 if freed else 2.0
    small = ["model.num_layers=4", "model.vocab_size=512", "training.seq_len=512"]
    job = ["model=llama3_8b", "cluster=h100_1x8", *small, f"training.software={software}"]
    layers = (LayerStrategy(1, 8, zero, "none", False),) * 7
    plan = Plan(1, (0, 7), layers)
    used = []
    for precision in ("bf16", "fp8"):
        problem = load_problem([*job, f"training.precision={precision}"])
        used.append(evaluate(plan, problem).memory_bytes[0])
    block = problem.model.layers[1].parameters(0)
    factor = 1.0 if freed else float(problem.cluster.groups[0].device.state_factor)
    assert used[1] - used[0] == pytest.approx(factor * copies * 4 * block, rel=0.02)


def test_eager_blocks_keep_what_transformers_saves_for_backward() -> None:
    """Every saved tensor of a block counts once, but for the scales of norms and softmax (0.5 %)."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    config = modeling.Qwen3Config(**sizes, intermediate_size=768, attn_implementation="sdpa")
    block = modeling.Qwen3DecoderLayer(config, 0).bfloat16()
    state = torch.ones(1, S, H, dtype=torch.bfloat16, requires_grad=True)
    angles = modeling.Qwen3RotaryEmbedding(config)(state, torch.arange(S)[None])
    given = {tensor.data_ptr() for tensor in (*block.parameters(), *angles)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(state, position_embeddings=angles)
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / S
    own = ModelConfig(
        name="x", num_layers=1, hidden_size=H, num_heads=4, vocab_size=512, max_seq_len=S
    )
    own = replace(own, num_kv_heads=2, ffn_hidden_size=768, gated_mlp=True, qk_norm=True)
    own = replace(own, norm_bias=False, linear_bias=False, dropout=False)
    one = torch.ones(1, 1)
    layer = Model(own, True).layers[1]
    eager = _stage(S * one, one[0], one[0], eager_blocks=True, gate_kept=True)
    assert float(activation_bytes(eager, layer)["none"]) == pytest.approx(S * counted, rel=0.01)
    usual = activation_bytes(_stage(S * one, one[0], one[0]), layer)["none"]
    assert float(usual) < 0.8 * S * counted


def test_backward_of_a_recomputed_eager_block_holds_the_gradients_of_its_mlp() -> None:
    """At the peak of its backward pass three tensors of the width of its MLP are gradients."""
    tokens, ffn = 512, 14336
    job = ["model=llama3_8b", "cluster=h100_1x8", f"training.seq_len={tokens}"]
    layers = (LayerStrategy(1, 8, 3, "full", False),) * 35
    problem = load_problem([*job, "training.software=accelerate"])
    eager = problem.software
    plan = Plan(1, (0, 35), layers)
    used = {}
    for blocks in (False, True):
        own = replace(problem, software=replace(eager, eager_blocks=blocks))
        used[blocks] = evaluate(plan, own).memory_bytes[0]
    batch = problem.training.global_batch_size // 8
    norms = 4.0 * 2 * 4096 * problem.cluster.groups[0].device.activation_factor
    more = tokens * batch * (norms + 2.0 * 3 * ffn)
    assert used[True] - used[False] == pytest.approx(float(more), rel=1e-6)
    block = problem.model.layers[1]
    assert float(mlp_bytes(block, torch.ones(1), 1.0)) == 2.0 * 3 * ffn
    assert float(mlp_bytes(block, torch.ones(1), -1.0)) == 2.0 * ffn


def test_a_fused_loss_loads_kernels_that_keep_no_norms_and_gates() -> None:
    job = ["model=llama3_8b", "cluster=h100_1x8", "training.software=accelerate"]
    usual, fused = (load_problem([*job, f"training.loss={loss}"]).software for loss in LOSSES)
    assert (usual.eager_blocks, usual.gate_kept) == (True, True)
    assert (fused.eager_blocks, fused.gate_kept) == (False, False)
