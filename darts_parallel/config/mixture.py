"""Rules of the model fields that describe experts and multi-head latent attention."""

from typing import Any

from darts_parallel.config.checks import require, require_at_least, require_at_most, require_divisor

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_mixture(model: Any) -> None:
    """Refuse fields of experts that break a rule.

    Args:
        model: A `ModelConfig`.

    Errors:
        ConfigError: names the key, its value, the rule and the closest valid value.
    """
    if model.num_experts is None:
        for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            value = getattr(model, key)
            require(value is None, f"model.{key}={value}", "go with model.num_experts", "null")
        return
    require_at_most("model.moe_router_topk", model.moe_router_topk, model.num_experts)
    require_at_most("model.first_k_dense_replace", model.first_k_dense_replace, model.num_layers)
    require(
        not model.num_encoder_layers,
        f"model.num_encoder_layers={model.num_encoder_layers}",
        "be 0 where model.num_experts is set, since experts are modelled in decoders",
        0,
    )
    _check_groups(model)
    _check_frequency(model)


def _check_groups(model: Any) -> None:
    groups, used = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is not None:
        require_divisor("model.moe_router_num_groups", groups, "model.num_experts", model.num_experts)
        if used is not None:
            require_at_most("model.moe_router_group_topk", used, groups)


def _check_frequency(model: Any) -> None:
    given = model.moe_layer_freq
    if isinstance(given, int) and not isinstance(given, bool):
        require_at_least("model.moe_layer_freq", given, 1)
        return
    listed = isinstance(given, (list, tuple))
    legal = listed and all(type(x) is int and x in (0, 1) for x in given)
    shown = f"a list of {len(given)}" if listed else repr(given)
    count = f"model.num_layers={model.num_layers}"
    require(
        legal and len(given) == model.num_layers,
        f"model.moe_layer_freq={shown}",
        f"be a whole number above 0 or a list of {count} zeros and ones",
        1,
    )


def expert_pattern(model: Any) -> tuple[bool, ...]:
    """Which layers have experts, one entry a layer.

    Args:
        model: A `ModelConfig`.
    """
    given, count, dense = model.moe_layer_freq, int(model.num_layers), int(model.first_k_dense_replace)
    if model.num_experts is None:
        return (False,) * count
    frequent = [i % given == 0 for i in range(count)] if isinstance(given, int) else [bool(x) for x in given]
    return tuple(has and i >= dense for i, has in enumerate(frequent))


def check_latent_attention(model: Any) -> None:
    """Refuse an incomplete multi-head latent attention.

    Args:
        model: A `ModelConfig`.

    Errors:
        ConfigError: a size is missing, or given without `multi_latent_attention`.
    """
    sizes = (*LATENT_SIZES, "q_lora_rank", "indexer_num_heads", "indexer_head_dim")
    if not model.multi_latent_attention:
        given = next((key for key in sizes if getattr(model, key) is not None), None)
        if given is not None:
            setting = f"model.{given}={getattr(model, given)}"
            require(False, setting, "go with model.multi_latent_attention=true", "null")
        return
    gate, heads, width = model.attention_gate_size, model.indexer_num_heads, model.indexer_head_dim
    require(
        gate is None,
        f"model.attention_gate_size={gate}",
        "go with model.multi_latent_attention=false",
        "null",
    )
    setting = f"model.indexer_num_heads={heads}"
    require((heads is None) == (width is None), setting, f"go with model.indexer_head_dim={width}", "null")
    for key in LATENT_SIZES:
        rule = "be given where model.multi_latent_attention=true"
        require(getattr(model, key) is not None, f"model.{key}", rule, 512 if key == "kv_lora_rank" else 128)
