"""Layers that differ: parameters, FLOP and bytes of each kind, and the sentences for what is no model."""

from math import prod

import pytest
import torch

from darts_parallel.cost.compute import fused_attention_seconds, unfused_attention_seconds
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.plans.degrees import context_degrees, legal_tensor_degrees
from darts_parallel.plans.strategy import LayerStrategy, Plan
from darts_parallel.problem.layer_spec import AttentionCore, LayerSpec
from darts_parallel.problem.problem import load_problem
from tests.support.layer_kinds import HYBRID, MIXER, PREDICTION, TOY, WINDOWS


def layers(overrides: list[str]) -> dict[str, LayerSpec]:
    """One layer of every kind of a problem."""
    return {layer.kind: layer for layer in load_problem(overrides).model.layers}


def test_a_chunked_scan_has_the_flop_of_its_products() -> None:
    """Dao and Gu 2024, section 6: the four products of a chunk, batched over groups or heads."""
    scan = layers(
        [*TOY, "model.hybrid_override_pattern=MMMM", "model.mamba_chunk_size=32", *MIXER]
    )["mamba"].scan
    heads, groups, state, size, chunk = 8, 4, 16, 16, 32
    scores, inside = (groups, chunk, state, chunk), (heads, chunk, chunk, size)
    states, outputs = (heads, size, chunk, state), (heads, chunk, state, size)
    products = [2 * prod(shape) for shape in (scores, inside, states, outputs)]
    assert scan.flops * chunk == sum(products)
    assert scan.flops_again * chunk == products[0] + products[2]


def test_a_block_is_its_attention_and_its_mlp() -> None:
    block, hybrid = layers(TOY)["block"], layers(HYBRID)
    attention, mlp = hybrid["sliding_attention"], hybrid["mlp"]
    for name in (
        "sharded_parameters",
        "replicated_parameters",
        "replicated_elements",
        "sharded_elements",
        "replicated_activation_bytes",
        "sharded_activation_bytes",
        "tp_collectives",
    ):
        assert getattr(block, name) == getattr(attention, name) + getattr(mlp, name), name
    assert block.gemms == attention.gemms + mlp.gemms
    assert not mlp.cores
    assert block.output_elements == attention.output_elements == mlp.output_elements
    assert layers(TOY)["embedding"].output_elements == block.output_elements


def test_a_window_leaves_the_keys_that_its_mask_leaves() -> None:
    for length, window in ((64, 16), (64, 1), (64, 63)):
        mask = torch.ones(length, length).tril().triu(1 - window)
        core = AttentionCore(4, 4, 16, True, window)
        # the kernel skips what lies above the diagonal, but for half of the diagonal itself
        assert core.keys(length) / 2 == pytest.approx(float(mask.sum()) / length, abs=0.5)
        assert core.keys(length) < AttentionCore(4, 4, 16, True).keys(length) == length
    assert AttentionCore(4, 4, 16, True, 64).keys(64) == 64
    assert AttentionCore(4, 4, 16, False, 16).keys(64) == 16


def test_windows_save_seconds_with_fused_attention_only() -> None:
    device = load_problem(TOY).cluster.groups[0].device
    tokens, tp = torch.tensor([[64.0]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    window, whole = AttentionCore(4, 4, 16, True, 16), AttentionCore(4, 4, 16, True)

    def seconds(core: AttentionCore, fused: bool) -> float:
        if fused:
            return float(fused_attention_seconds(core, tokens, 64, tp, device, eight_bit=False))
        return float(unfused_attention_seconds(core, tokens, 64, tp, device, width=2))

    assert seconds(window, True) == pytest.approx(
        seconds(whole, True) * window.keys(64) / 64, rel=1e-12
    )
    assert seconds(window, False) == seconds(whole, False)


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [("2", "wgwg"), ("4", "wwwg"), ("null", "wwww"), ("[1,0,0,1]", "wggw"), ("1", "gggg")],
)
def test_the_pattern_says_which_blocks_are_windows(pattern: str, kinds: str) -> None:
    problem = load_problem([*WINDOWS, f"model.sliding_window_pattern={pattern}"])
    blocks = [layer for layer in problem.model.layers if layer.recomputable]
    assert "".join("w" if layer.kind == "sliding_block" else "g" for layer in blocks) == kinds
    assert [layer.cores[0].window for layer in blocks] == [
        16 if kind == "w" else None for kind in kinds
    ]


def test_a_prediction_module_adds_a_block_a_product_and_three_norms() -> None:
    h = 64
    plain, more = (
        load_problem([*TOY, "model.tie_embeddings=false", *extra]).model
        for extra in ([], PREDICTION[3:])
    )
    block = next(layer for layer in plain.layers if layer.kind == "block")
    norm = 2 * h
    assert more.num_parameters - plain.num_parameters == block.parameters(0) + 2 * h * h + 3 * norm
    # the state of the main model and that of the prediction both go to the head, which has logits of both
    kinds = {layer.kind: layer for layer in more.layers}
    assert kinds["mtp"].output_elements == 2 * h
    assert kinds["head"].output_elements == 2 * 256
    seq_len = 64
    extra = more.flops_per_token(seq_len) - plain.flops_per_token(seq_len)
    own = sum(g.in_features * g.out_features for g in block.gemms) + 2 * h * h + 256 * h
    assert extra == pytest.approx(6.0 * own + 6.0 * 2 * 4 * 16 * seq_len, rel=1e-12)


def test_later_modules_and_a_tied_head_share_the_first_ones_table_and_stage() -> None:
    untied = load_problem([*PREDICTION, "model.mtp_num_layers=2"]).model.layers
    assert [(layer.fused_to_previous, layer.vocabulary_parameters) for layer in untied[-4:-1]] == [
        (False, 64),
        (True, 0),
        (False, 64),
    ]
    tied = load_problem([*TOY, "model.mtp_num_layers=1"]).model
    assert [
        (layer.fused_to_previous, layer.vocabulary_parameters) for layer in tied.layers[-3:-1]
    ] == [(False, 0), (True, 64)]
    block = next(layer for layer in tied.layers if layer.kind == "block")
    plain = load_problem(TOY).model.num_parameters
    assert tied.num_parameters - plain == block.parameters(0) + 2 * 64 * 64 + 3 * 2 * 64


def test_the_copy_of_the_table_weighs_on_the_stage_of_the_module() -> None:
    problem = load_problem(PREDICTION)
    strategies = (LayerStrategy(1, 4),) * len(problem.model.layers)
    last, first = (
        evaluate(Plan(2, (0, cut, 8), strategies), problem).memory_bytes for cut in (5, 6)
    )
    # the module moves from the second stage to the first, where the table is as large again
    assert last[1] - first[1] > 16 * 64 * 256


def test_state_spaces_limit_tensor_and_context_parallelism_to_their_heads() -> None:
    for more, degrees in (((), [1, 2, 4]), (("model.mamba_num_groups=2",), [1, 2])):
        problem = load_problem([*HYBRID, *more])
        assert legal_tensor_degrees(problem.model, problem.cluster, None) == degrees
    problem = load_problem([*HYBRID, "model.mamba_num_heads=6", "model.mamba_num_groups=2"])
    assert context_degrees(
        problem.model, problem.cluster.num_devices, problem.training.seq_len
    ) == [1, 2]


def test_context_parallelism_costs_a_scan_two_exchanges() -> None:
    problem = load_problem([*HYBRID, "model.hybrid_override_pattern=MMMMM"])
    cost = evaluate(Plan(2, (0, 8), (LayerStrategy(1, 4),) * 8, cp=2), problem)
    assert cost.breakdown_s["context_parallel"] > 0
