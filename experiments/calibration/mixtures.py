"""Rows of mixtures of experts: their architectures, mappings and software, by rules for what a row leaves out.

| missing | rule |
| --- | --- |
| sizes | those of the public configuration of the model that the name says (`conf/model`), blocks as printed |
| dp | n_gpus / (tp * pp * cp): some releases print the data-parallel degree beyond ep |
| ep, etp | 1; etp = tp in NeMo's Grok-1 recipes, which had no degree of its own for experts, and in the methods without folding of arXiv 2504.14960 (the default of Megatron-Core) |
| chunks a stage | arXiv 2504.14960: one block each (7 blocks a stage divide into 7 chunks or none; from 128 to 16 micro-batches on 8 stages its MFU falls 1.16 times, without chunks the bubble alone would be 1.36) |
| number of micro-batches | global batch / (dp * micro-batch) |
| ZeRO stage | 3 of rows whose notes name the method FSDP |
| sequence length, batch | of torchtitan's runs: 4,096 tokens, one micro-batch a rank, its default recomputation |
| seconds per iteration | from the printed MFU, or model FLOP/s, where nothing else is: model FLOP (half of the attention matrix) / (MFU * 989.5 TFLOP/s) |
| dispatcher | DeepEP or HybridEP where the row or its source names them, as Megatron-Bridge's recipes and DGX Cloud's since release 25.08 do; else all-to-all |
| CUDA graphs of whole iterations, all-to-all beside compute, attention in 8 bits | all on in the MXFP8 recipes of Megatron-Bridge for DeepSeek-V3, Qwen3 and GPT-OSS on GB200 and GB300 since container 26.06 (its pull requests 3983, 4173, 4226, 4249) |
| balance | forced: benchmarks of speed route evenly |
| capacity | the printed factor; 1 where the notes say that tokens are dropped |
| stages | `pp_layout` as printed |
"""  # noqa: E501

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import RECOMPUTE_MODULES, TrainingConfig, config_dir
from darts_parallel.plan.strategy import LayerStrategy
from darts_parallel.problem.model import Model
from experiments.calibration.rows import Row, RowError
from experiments.comparison.layouts import chunks_of

MFU_PEAK = 989.5e12
"""FLOP/s of an H100 in bf16, against which the sources print MFU."""
PRESETS = (
    (r"deepseek.?v3", "deepseek_v3"),
    (r"kimi.?k2", "kimi_k2"),
    (r"qwen3.?30b", "qwen3_30b_a3b"),
    (r"qwen3.?235b", "qwen3_235b_a22b"),
    (r"qwen2.?57b", "qwen2_57b_a14b"),
    (r"gpt.?oss.?20b", "gpt_oss_20b"),
    (r"gpt.?oss.?120b", "gpt_oss_120b"),
    (r"mixtral.?8x7b", "mixtral_8x7b"),
    (r"mixtral.?8x22b", "mixtral_8x22b"),
    (r"maverick", "llama4_maverick"),
    (r"grok", "grok1"),
    (r"nemotron.?3.?nano", "nemotron3_nano_30b_a3b"),
)
"""Regular expressions on the lower-case name, and the files of their architectures."""
DEEPSEEK_V2 = {
    "num_layers": 60, "hidden_size": 5120, "num_heads": 128, "ffn_hidden_size": 12288, "gated_mlp": True,
    "vocab_size": 102400, "tie_embeddings": False, "learned_positions": False, "dropout": False,
    "linear_bias": False, "norm_bias": False, "num_experts": 160, "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 3072, "first_k_dense_replace": 1,
    "moe_router_num_groups": 8, "moe_router_group_topk": 3, "multi_latent_attention": True,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip
"""DeepSeek-V2 (arXiv 2405.04434, section 3.1.2)."""
NOT_MODELLED = re.compile(r"nemotron.?3(?!.?nano)|mamba|hybrid")
FLEX = re.compile(r"deepep|hybridep|hybrid-ep|megatron-bridge|dgxc-benchmarking.*@v25\.(?:0[89]|1\d)")
RECORDED = re.compile(r"\((26\.06(?:\.01)?|26\.08) nemo container\)")
"""Containers of Megatron-Bridge whose MXFP8 recipes on Blackwell run whole iterations as CUDA graphs."""
RECORDED_MODELS = re.compile(r"deepseek.?v3|qwen3|gpt.?oss")
FOLDING = re.compile(r"2504\.14960")
"""MoE Parallel Folding: every method of its tables is Megatron-Core's."""
TORCHTITAN_SEQ_LEN = 4096
"""Of torchtitan's Qwen3-30B-A3B: its printed FLOP/s over its tokens/s say so, too, by its own formula."""
DROPPED = re.compile(r"token.?drop")
CELLS = {
    "layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "ffn": "ffn_hidden_size",
    "vocab": "vocab_size",
}  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """What a row says of a mixture beyond the fields of a dense run."""

    sizes: dict[str, Any]
    """Fields of `ModelConfig`."""
    ep: int
    etp: int
    training: dict[str, Any]
    """Fields of `TrainingConfig`."""
    chunks: tuple[int, ...] | None
    """Blocks of every chunk of the pipeline, as printed."""


def is_mixture(row: Row) -> bool:
    """Whether a row is of a mixture whose sizes are known."""
    try:
        return _sizes(row) is not None
    except RowError:
        return False


@lru_cache(maxsize=32)
def _preset(name: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(Path(config_dir()) / "model" / f"{name}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _sizes(row: Row) -> dict[str, Any] | None:
    """Fields of `ModelConfig`; None where the row is not of a known mixture."""
    name = row.text("model").lower()
    if NOT_MODELLED.search(name):
        return None
    preset = next((preset for words, preset in PRESETS if re.search(words, name)), None)
    sizes: dict[str, Any] = dict(_preset(preset)) if preset else {}
    if not sizes:
        sizes = dict(DEEPSEEK_V2) if re.search(r"deepseek.?v2", name) else _own_sizes(row)
    if not sizes:
        return None
    layers = row.count("layers")
    if layers and layers != sizes["num_layers"]:
        sizes["num_layers"] = layers
        # proxies of few layers keep the dense ones that they print
        dense = row.text("dense_first_layers")
        sizes["first_k_dense_replace"] = min(int(dense) if dense.isdigit() else 0, layers)
        if isinstance(sizes.get("moe_layer_freq"), list):
            sizes["moe_layer_freq"] = sizes["moe_layer_freq"][:layers]
    return sizes


def _own_sizes(row: Row) -> dict[str, Any]:
    """Sizes of a mixture without a public name, from the cells that a Llama-like block needs."""
    keys = {
        "num_experts": "n_experts", "moe_router_topk": "top_k", "moe_ffn_hidden_size": "moe_ffn",
        "num_layers": "layers", "hidden_size": "hidden", "num_heads": "heads", "vocab_size": "vocab",
    }  # fmt: skip
    found = {key: row.count(cell) for key, cell in keys.items()}
    if any(value is None for value in found.values()) or (found["num_experts"] or 0) < 2:
        return {}
    shared = row.count("shared_experts") or 0
    width = found["moe_ffn_hidden_size"] or 0
    dense = row.text("dense_first_layers")
    return found | {
        "num_kv_heads": row.count("kv_heads"), "gated_mlp": True, "tie_embeddings": False,
        "learned_positions": False, "dropout": False, "linear_bias": False, "norm_bias": False,
        "ffn_hidden_size": row.count("ffn") or width,
        # a number of experts as wide as the routed ones, or the width itself
        "moe_shared_expert_intermediate_size": (shared if shared > 16 else shared * width) or None,
        "first_k_dense_replace": int(dense) if dense.isdigit() else 0,
    }  # fmt: skip


def complete(row: Row) -> Row:
    """The row with what its mixture's public configuration and the rules say in its empty cells.

    Rows of other models come back as they are.
    """
    if row.broken or not is_mixture(row):
        return row
    sizes = _sizes(row)
    assert sizes is not None
    cells = dict(row.cells)
    for cell, key in CELLS.items():
        if not row.text(cell) or row.count(cell) is None:
            cells[cell] = str(sizes[key])
    cells["kv_heads"] = str(sizes.get("num_kv_heads") or sizes["num_heads"])
    if re.search(r"fp8-mx|mxfp8", row.text("precision").lower()):
        cells["precision"] = "mxfp8"
    degrees = [row.count(key) or 1 for key in ("tp", "pp", "cp")]
    gpus, product = row.count("n_gpus"), degrees[0] * degrees[1] * degrees[2]
    if gpus and gpus % product == 0:
        cells["dp"] = str(gpus // product)
    if re.search(r"method fsdp\b", row.text("notes").lower()):
        cells["zero"] = "3"  # the column says it of all rows of the table at once
    batch, micro = row.count("global_batch"), row.count("micro_batch")
    ranks = int(cells["dp"]) if cells.get("dp", "").isdigit() else None
    if batch and micro and ranks and batch % (ranks * micro) == 0:
        cells["num_microbatches"] = str(batch // (ranks * micro))
    source = row.text("source").lower()
    if "torchtitan" in source and micro and not batch:
        cells |= {"seq_len": cells.get("seq_len") or str(TORCHTITAN_SEQ_LEN), "num_microbatches": "1"}
        cells["recompute"] = cells.get("recompute") or "selective, every second product (its default)"
    implied = re.search(r"global batch (\d+) implied", row.text("notes").lower())
    if implied and not batch:
        cells["global_batch"] = implied[1]
    if FOLDING.search(source) and not row.text("vpp_chunks"):
        cells["vpp_chunks"] = str(max(sizes["num_layers"] // degrees[1], 1) if degrees[1] > 1 else 1)
    filled = replace(row, cells=cells)
    printed = ("iteration_s", "tokens_per_s_per_gpu", "samples_per_s")
    if not any(row.number(key) for key in printed):
        rate = _flops_per_gpu(row)
        if rate:
            cells["iteration_s"] = repr(_model_flops(filled, sizes) / (rate * filled.require("n_gpus")))
    return filled


def _flops_per_gpu(row: Row) -> float | None:
    """Model FLOP/s of a GPU by the printed MFU, or by the printed model FLOP/s of the folding paper."""
    share, rate = row.number("mfu_pct"), row.number("tflops_per_gpu")
    if share:
        return share / 100 * MFU_PEAK
    return rate * 1e12 if rate and FOLDING.search(row.text("source").lower()) else None


def _model_flops(row: Row, sizes: dict[str, Any]) -> float:
    """Model FLOP of an iteration; of the attention matrix the half below the diagonal.

    The long contexts of the folding paper say so: with the whole matrix its runs of 16k to 128k tokens
    would be 1.2 to 1.4 times slower, against the cost model, than its runs of 4k.
    """
    seq_len, batch = (row.require(key) for key in ("seq_len", "global_batch"))
    model = Model(model_config(row, sizes, seq_len), fused_attention=True)
    whole, none = model.flops_per_token(seq_len), model.flops_per_token(0)
    return (none + (whole - none) / 2.0) * batch * seq_len


def model_config(row: Row, sizes: dict[str, Any], seq_len: int) -> ModelConfig:
    """The model of a row."""
    capacity = 1.0 if _drops(row) else None
    given = {"name": row.text("model") or "unnamed", "max_seq_len": max(seq_len, 1)}
    return ModelConfig(**{**sizes, **given, "moe_expert_capacity_factor": capacity})


def _drops(row: Row) -> bool:
    text = " ".join(row.text(key) for key in ("model", "dispatcher", "notes")).lower()
    return bool(DROPPED.search(text)) and "dropless" not in row.text("model").lower()


def mixture_of(row: Row) -> Mixture | None:
    """The mixture of a row; None for other models.

    Errors:
        RowError: the mapping contradicts itself.
    """
    sizes = _sizes(row)
    if sizes is None:
        return None
    tp = row.count("tp") or 1
    ep, etp = row.count("ep") or 1, row.count("etp")
    if etp is None:
        default = "grok" in row.text("model").lower() or FOLDING.search(row.text("source").lower())
        etp = tp if default else 1
    stage = (row.count("dp") or 1) * tp * (row.count("cp") or 1)
    if stage % (ep * etp):
        raise RowError(f"ep={ep} times etp={etp} does not divide the {stage} GPUs of a stage")
    words = " ".join(row.text(key) for key in ("dispatcher", "source", "notes")).lower()
    modules = [m for m in RECOMPUTE_MODULES if re.search(rf"\b{m}\b", row.text("recompute").lower())]
    recorded = _is_recorded(row)
    training = {
        "cuda_graphs": "full_iteration" if recorded else "none",
        "fp8_dot_product_attention": recorded,
        "recompute_modules": modules or ["core_attn"],
        "moe_token_dispatcher_type": "flex" if FLEX.search(words) else "alltoall",
        "moe_load_imbalance": 1.0,
        "overlap_moe_expert_parallel_comm": recorded
        or bool(re.search(r"ep overlap on|with ep overlap|; ep overlap(?! off)", words)),
    }
    return Mixture(sizes, ep, etp, training, printed_layout(row))


def _is_recorded(row: Row) -> bool:
    cells = {key: row.text(key).lower() for key in ("source", "model", "gpu", "precision")}
    return bool(
        RECORDED.search(cells["source"])
        and RECORDED_MODELS.search(cells["model"])
        and re.search(r"gb[23]00", cells["gpu"])
        and re.search(r"mxfp8|fp8-mx", cells["precision"])
    )


def printed_layout(row: Row) -> tuple[int, ...] | None:
    """Blocks of every chunk of `Et|(tt|)*30L`; None where the row prints no such layout.

    E is the embedding, t a block, m a prediction module, L the head.
    """
    text = re.sub(r"\s", "", row.text("pp_layout"))
    if not re.fullmatch(r"[EtmL|()*\d]+", text):
        return None
    return tuple(chunk.count("t") for chunk in chunks_of(text))


def with_mixture(
    row: Row, model: ModelConfig, training: TrainingConfig
) -> tuple[ModelConfig, TrainingConfig]:
    """Model and job of a row, those of a mixture put in the place of a dense run's."""
    mixture = mixture_of(row)
    if mixture is None:
        return model, training
    return (
        model_config(row, mixture.sizes, training.seq_len),
        replace(training, **mixture.training),
    )


def expert_strategy(row: Row, strategy: LayerStrategy) -> LayerStrategy:
    """The strategy of a layer with the degrees of the experts; a dense run's comes back as it is."""
    mixture = mixture_of(row)
    if mixture is None:
        return strategy
    return replace(strategy, ep=mixture.ep, etp=mixture.etp, shard_size=0, sequence_parallel=strategy.tp > 1)
