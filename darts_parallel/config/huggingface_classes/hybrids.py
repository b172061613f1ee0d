"""Hugging Face classes whose layers differ in kind: Nemotron-H and Jamba (`transformers` 5.23)."""

from collections.abc import Callable
from math import ceil
from typing import Any

from darts_parallel.config.huggingface_architectures import Reader, read_rotary
from darts_parallel.config.layer_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from darts_parallel.errors import ConfigError

KINDS = {
    "mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION,
    "mlp": MLP, "moe": EXPERTS,
}  # fmt: skip
"""Words of `layers_block_type` and the symbols of a pattern."""


def _nemotron_pattern(r: Reader) -> str:
    """The pattern, which files of transformers 4 write as text and those of 5 as a list of words."""
    pattern = r.text("hybrid_override_pattern")
    words = r.words("layers_block_type") or r.words("layer_types")
    if words is not None and not pattern:
        unknown = next((word for word in words if word not in KINDS), None)
        if unknown is not None:
            raise r.refuse(f"layers_block_type names {unknown}, which is not modelled", ", ".join(KINDS))
        pattern = "".join(KINDS[word] for word in words)
    if not pattern:
        raise ConfigError(
            f"{r.place}: hybrid_override_pattern is missing and has no default; try a text of "
            f"{MAMBA}, {ATTENTION} and {MLP}."
        )
    return pattern


def _nemotron_h(r: Reader) -> dict[str, Any]:
    for key in ("use_bias", "mamba_proj_bias"):
        if r.flag(key):
            raise r.refuse(f"{key}=True, and products of a state space with biases are not modelled", "false")
    if r.count("num_nextn_predict_layers"):
        raise r.refuse("num_nextn_predict_layers of a hybrid are not modelled", "0")
    pattern = _nemotron_pattern(r)
    return read_rotary(
        r,
        num_layers=len(pattern),
        hybrid_override_pattern=pattern,
        head_dim=r.optional("head_dim") or r.optional("attention_head_dim") or 128,
        gated_mlp=False,
        mlp_bias=True if r.flag("mlp_bias") else None,
        mamba_num_heads=r.integer("mamba_num_heads"),
        mamba_head_dim=r.integer("mamba_head_dim"),
        mamba_state_dim=r.integer("ssm_state_size"),
        mamba_num_groups=r.optional("n_groups") or r.integer("mamba_n_groups"),
        mamba_conv_kernel=r.integer("conv_kernel"),
        mamba_chunk_size=r.integer("chunk_size"),
    )


def _jamba(r: Reader) -> dict[str, Any]:
    """Every layer of a file is two here: a mixer (Mamba-1 or attention) and an MLP."""
    if r.flag("mamba_proj_bias"):
        raise r.refuse(
            "mamba_proj_bias=True, and products of a state space with biases are not modelled", "false"
        )
    h, layers, experts = r.integer("hidden_size"), r.integer("num_hidden_layers"), r.integer("num_experts")
    every, offset = r.integer("attn_layer_period"), r.count("attn_layer_offset")
    expert_every, expert_offset = r.integer("expert_layer_period"), r.count("expert_layer_offset")
    pattern = "".join(
        (ATTENTION if i % every == offset else MAMBA)
        + (EXPERTS if experts > 1 and i % expert_every == expert_offset else MLP)
        for i in range(layers)
    )
    rank = ceil(h / 16) if r.text("mamba_dt_rank") in ("", "auto") else r.integer("mamba_dt_rank")
    return read_rotary(
        r,
        num_layers=len(pattern),
        hybrid_override_pattern=pattern,
        mamba_num_heads=r.integer("mamba_expand") * h,
        mamba_head_dim=1,
        mamba_state_dim=r.integer("mamba_d_state"),
        mamba_conv_kernel=r.integer("mamba_d_conv"),
        mamba_dt_rank=rank,
    )


HYBRIDS: dict[str, tuple[Callable[[Reader], dict[str, Any]], dict[str, Any]]] = {
    "nemotron_h": (_nemotron_h, {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4, "chunk_size": 128,
    }),
    "jamba": (_jamba, {
        "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144,
        "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8,
        "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": "auto",
    }),
}  # fmt: skip
"""By `model_type`: how its keys read, and what they are where the file is silent."""


def has_experts(values: dict[str, Any]) -> bool:
    """Whether the layers of a file have experts: Nemotron-H files name experts that no layer may have."""
    if values.get("model_type") != "nemotron_h":
        return True
    words = values.get("layers_block_type") or values.get("layer_types") or ()
    return EXPERTS in str(values.get("hybrid_override_pattern") or "") or "moe" in words
