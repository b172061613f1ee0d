"""Kinds of blocks (hybrids, sliding windows, experts), and the rules of a model's keys."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from darts_parallel.config.checks import (
    MAX_SIZE,
    as_yaml,
    require,
    require_at_least,
    require_at_most,
    require_divisor,
    require_member,
    require_within,
)
from darts_parallel.errors import ConfigError

if TYPE_CHECKING:
    from darts_parallel.config.model import ModelConfig

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
SYMBOLS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", EXPERTS: "experts"}
"""Symbols of a hybrid pattern (Megatron-LM, `megatron/core/models/hybrid`), and the kinds they
name."""
SCORE_FUNCTIONS = ("softmax", "sigmoid")
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def symbol(model: "ModelConfig", index: int) -> str | None:
    """Return the symbol of block `index` of a hybrid pattern; None for attention and MLP."""
    pattern = model.hybrid_override_pattern
    return pattern[index] if pattern else None


def windowed(model: "ModelConfig", index: int) -> bool:
    """Return whether block `index` attends to the last `sliding_window` tokens only.

    A pattern n leaves every n-th block global (Gemma 3: 6, five windows and one global block); a
    list says it block by block; null makes all of them windows. The blocks of an encoder-decoder
    have none.
    """
    if model.sliding_window is None or model.num_encoder_layers:
        return False
    pattern = model.sliding_window_pattern
    if pattern is None:
        return True
    return bool(pattern[index]) if isinstance(pattern, Sequence) else (index + 1) % pattern != 0


def expert_pattern(model: "ModelConfig") -> tuple[bool, ...]:
    """Return which layers have experts, one entry a layer."""
    given = model.moe_layer_freq
    count = int(model.num_layers)
    dense = int(model.first_k_dense_replace)
    if model.num_experts is None:
        return (False,) * count
    frequent = (
        [i % given == 0 for i in range(count)]
        if isinstance(given, int)
        else [bool(x) for x in given]
    )
    return tuple(has and i >= dense for i, has in enumerate(frequent))


def score_function(model: "ModelConfig") -> str:
    """Return the function that turns the router's product into scores, one of `SCORE_FUNCTIONS`."""
    return model.moe_router_score_function or SCORE_FUNCTIONS[model.moe_router_enable_expert_bias]


def check_model(model: "ModelConfig") -> None:
    """Refuse keys that make no model together.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    _check_latent_attention(model)
    _check_experts(model)
    if model.hybrid_override_pattern is not None:
        _check_pattern(model, model.hybrid_override_pattern)
    if model.sliding_window_pattern is not None:
        _check_windows(model, model.sliding_window_pattern)
    require_at_most("model.mtp_num_layers", model.mtp_num_layers, model.num_layers)
    causal = model.causal and not model.num_encoder_layers
    _require(
        model,
        "mtp_num_layers",
        causal or not model.mtp_num_layers,
        "be 0 where the model is no causal decoder",
        0,
    )
    layers = model.num_layers
    rule = f"leave a decoder layer of model.num_layers={layers}"
    _require(model, "num_encoder_layers", model.num_encoder_layers < layers, rule, layers - 1)
    if model.head_dim is None and not model.multi_latent_attention:
        require_divisor("model.num_heads", model.num_heads, "model.hidden_size", model.hidden_size)
    if model.num_kv_heads is not None:
        require_divisor(
            "model.num_kv_heads", model.num_kv_heads, "model.num_heads", model.num_heads
        )


def _require(model: "ModelConfig", key: str, valid: bool, rule: str, near: Any) -> None:
    require(valid, f"model.{key}={getattr(model, key)}", rule, near)


def _check_latent_attention(model: "ModelConfig") -> None:
    """Refuse an incomplete multi-head latent attention, and its sizes without it."""
    latent = model.multi_latent_attention
    others = (*LATENT_SIZES[:-1], "q_lora_rank", "indexer_num_heads", "indexer_head_dim")
    for key in ("attention_gate_size", "window_kv_heads", "window_head_dim") if latent else others:
        rule = f"go with model.multi_latent_attention={as_yaml(not latent)}"
        _require(model, key, getattr(model, key) is None, rule, "null")
    heads = model.indexer_num_heads
    width = model.indexer_head_dim
    rule = f"go with model.indexer_head_dim={width}"
    _require(model, "indexer_num_heads", (heads is None) == (width is None), rule, "null")
    for key in LATENT_SIZES if latent else ():
        rule = "be given where model.multi_latent_attention=true"
        require(
            getattr(model, key) is not None,
            f"model.{key}",
            rule,
            512 if key == "kv_lora_rank" else 128,
        )


def _check_experts(model: "ModelConfig") -> None:
    count = model.num_experts
    if count is None:
        for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            _require(model, key, getattr(model, key) is None, "go with model.num_experts", "null")
        return
    require_at_most("model.moe_router_topk", model.moe_router_topk, count)
    require_at_most("model.first_k_dense_replace", model.first_k_dense_replace, model.num_layers)
    rule = "be 0 where model.num_experts is set, since experts are modelled in decoders"
    _require(model, "num_encoder_layers", not model.num_encoder_layers, rule, 0)
    groups = model.moe_router_num_groups
    used = model.moe_router_group_topk
    if groups is not None:
        require_divisor("model.moe_router_num_groups", groups, "model.num_experts", count)
        if used is not None:
            require_at_most("model.moe_router_group_topk", used, groups)
    function = score_function(model)
    key = "moe_router_score_function"
    require_member(f"model.{key}", function, SCORE_FUNCTIONS)
    unbiased = function == "sigmoid" or not model.moe_router_enable_expert_bias
    _require(model, key, unbiased, "be sigmoid with model.moe_router_enable_expert_bias", "sigmoid")
    given = model.moe_layer_freq
    layers = model.num_layers
    if isinstance(given, int) and not isinstance(given, bool):
        require_at_least("model.moe_layer_freq", given, 1)
        return
    several = isinstance(given, (list, tuple))
    mask = several and len(given) == layers and all(type(x) is int and x in (0, 1) for x in given)
    shown = f"a list of {len(given)}" if several else repr(given)
    rule = f"be a whole number above 0 or a list of model.num_layers={layers} zeros and ones"
    require(mask, f"model.moe_layer_freq={shown}", rule, 1)


def _check_pattern(model: "ModelConfig", pattern: str) -> None:
    key = "model.hybrid_override_pattern"
    layers = model.num_layers
    known = "".join(char for char in pattern if char in SYMBOLS)
    rule = f"consist of {', '.join(SYMBOLS)} (Mamba, attention, MLP, experts)"
    near = known or (ATTENTION + MLP) * (layers // 2) or ATTENTION
    require(bool(pattern) and known == pattern, f"{key}={pattern!r}", rule, near)
    size = f"{key} has {len(pattern)} layers, which"
    near = f"model.num_layers={len(pattern)}"
    require(len(pattern) == layers, size, f"be model.num_layers={layers}", near)
    rule = f"be null where model.num_encoder_layers={model.num_encoder_layers}"
    require(not model.num_encoder_layers, key, rule, "model.num_encoder_layers=0")
    without = EXPERTS not in pattern or bool(model.num_experts)
    has = f"{key}={pattern} has expert layers, and model.num_experts"
    require(without, has, "say how many experts they have", pattern.replace(EXPERTS, MLP))


def _check_windows(model: "ModelConfig", pattern: Any) -> None:
    key = "model.sliding_window_pattern"
    layers = model.num_layers
    if model.sliding_window is None:
        raise ConfigError(
            f"{key}={pattern} needs model.sliding_window, the tokens of a window; try null."
        )
    if isinstance(pattern, (list, tuple)):
        near = [int(bool(pattern[i % len(pattern)])) if pattern else 1 for i in range(layers)]
        rule = f"have a 0 (global) or 1 (window) for each of the {layers} layers"
        valid = len(pattern) == layers and all(value in (0, 1) for value in pattern)
        require(valid, f"{key}={list(pattern)}", rule, near)
        return
    rule = "be a whole number (every n-th layer is global) or a list of 0 and 1"
    require(
        isinstance(pattern, int) and not isinstance(pattern, bool), f"{key}={pattern!r}", rule, 6
    )
    require_within(key, pattern, 1, MAX_SIZE)
