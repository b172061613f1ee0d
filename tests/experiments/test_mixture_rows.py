"""Rows of mixtures of experts: what their names, notes and layouts say."""

import pytest

from experiments.calibration.problems import build_case
from experiments.data.runs import MeasuredRun
from experiments.data.table import RowError, TableRow
from tests.support.measured_files import RUN, run_of

MIXTRAL = {
    "model": "Mixtral-8x22B",
    "layers": "56",
    "hidden": "6144",
    "heads": "48",
    "kv_heads": "8",
    "ffn": "",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "128",
    "dp": "8",
    "tp": "2",
    "pp": "8",
    "cp": "1",
    "ep": "8",
    "etp": "1",
    "vpp_chunks": "",
    "micro_batch": "1",
    "num_microbatches": "32",
    "global_batch": "256",
    "zero": "1 (distributed optimizer)",
    "recompute": "",
    "sequence_parallel": "",
    "precision": "bf16",
    "iteration_s": "",
    "mfu_pct": "49.3",
    "memory_gb": "",
    "n_experts": "8",
    "top_k": "2",
    "moe_ffn": "16384",
    "n_params": "",
    "dispatcher": "all-to-all, token drop",
}


def run(**cells: str) -> MeasuredRun:
    return run_of(TableRow("moe.csv", 2, {**RUN, **MIXTRAL, **cells}))


def test_a_published_mapping_becomes_a_plan_with_folded_experts() -> None:
    published = run()
    case = build_case(published)
    assert {(s.tp, s.dp, s.ep, s.etp, s.sequence_parallel) for s in case.plan.layers} == {
        (2, 8, 8, 1, True)
    }
    assert case.problem.model.num_parameters == 140_620_634_112
    # tokens are dropped at capacity 1, and the seconds come from the printed MFU
    assert case.problem.config.model.moe_expert_capacity_factor == 1.0
    # of the attention matrix the half below the diagonal
    tokens = [case.problem.model.flops_per_token(seq_len) for seq_len in (0, 4096)]
    flops = sum(tokens) / 2 * 256 * 4096
    assert published.iteration_s == pytest.approx(flops / (0.493 * 989.5e12 * 128))


def test_a_printed_data_parallel_degree_beyond_ep_is_corrected() -> None:
    corrected = run(dp="1", num_microbatches="7")
    assert (corrected.dp, corrected.num_micro_batches) == (8, 32)


def test_a_rows_own_columns_win_over_a_preset_of_like_name() -> None:
    fine = build_case(run(n_experts="64", top_k="8", moe_ffn="2048", model="Mixtral-8x22B-G8T8"))
    config = fine.problem.config.model
    assert (config.num_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (64, 8, 2048)
    told = run(cuda_graphs="full_iteration", gradient_bits="16", fp8_dot_product_attention="0")
    assert (told.cuda_graphs, told.gradient_bits) == ("full_iteration", 16)


def test_dense_rows_have_no_experts() -> None:
    dense = run_of(TableRow("a.csv", 2, dict(RUN)))
    assert (dense.architecture, dense.mixture, dense.ep) == ("", False, 1)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("E|t*10|(t*8|)*4t*7|t*7L", (0, 10, 8, 8, 8, 8, 7, 7)),
        ("Et*7|(t*7|)*6|t*7mL", (7,) * 8),  # nine chunks: of another model
        ("", (7,) * 8),
        ("balanced", (7,) * 8),
    ],
)
def test_a_printed_layout_says_the_blocks_of_every_chunk(
    text: str, blocks: tuple[int, ...]
) -> None:
    assert run(pp_layout=text).blocks == blocks


def test_degrees_that_do_not_divide_a_stage_are_a_reason() -> None:
    with pytest.raises(RowError, match="ep=3 times etp=1 does not divide the 16 GPUs"):
        run(ep="3")
