"""Rules of the model fields that describe experts and multi-head latent attention."""

from typing import Any

from darts_parallel.config.checks import require_at_least, require_at_most
from darts_parallel.errors import ConfigError

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
            if getattr(model, key) is not None:
                raise ConfigError(
                    f"model.{key}={getattr(model, key)} must go with model.num_experts; try null."
                )
        return
    require_at_most("model.moe_router_topk", model.moe_router_topk, model.num_experts)
    require_at_most("model.first_k_dense_replace", model.first_k_dense_replace, model.num_layers)
    if model.num_encoder_layers:
        raise ConfigError(
            f"model.num_encoder_layers={model.num_encoder_layers} must be 0 where model.num_experts is set, "
            "since experts are modelled in decoders; try 0."
        )
    _check_groups(model)
    _check_frequency(model)


def _check_groups(model: Any) -> None:
    groups, used = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None:
        return
    if model.num_experts % groups:
        near = next(g for g in range(groups, 0, -1) if model.num_experts % g == 0)
        raise ConfigError(
            f"model.moe_router_num_groups={groups} must divide model.num_experts={model.num_experts}; "
            f"try {near}."
        )
    if used is not None:
        require_at_most("model.moe_router_group_topk", used, groups)


def _check_frequency(model: Any) -> None:
    given = model.moe_layer_freq
    if isinstance(given, int) and not isinstance(given, bool):
        require_at_least("model.moe_layer_freq", given, 1)
        return
    listed = isinstance(given, (list, tuple))
    legal = listed and all(type(x) is int and x in (0, 1) for x in given)
    if not legal or len(given) != model.num_layers:
        shown = f"a list of {len(given)}" if listed else repr(given)
        raise ConfigError(
            f"model.moe_layer_freq={shown} must be a whole number above 0 or a list of model.num_layers="
            f"{model.num_layers} zeros and ones; try 1."
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
    sizes = (*LATENT_SIZES, "q_lora_rank")
    if not model.multi_latent_attention:
        given = next((key for key in sizes if getattr(model, key) is not None), None)
        if given is not None:
            raise ConfigError(
                f"model.{given}={getattr(model, given)} must go with model.multi_latent_attention=true; "
                "try null."
            )
        return
    for key in LATENT_SIZES:
        if getattr(model, key) is None:
            raise ConfigError(
                f"model.{key} must be given where model.multi_latent_attention=true; try "
                f"{512 if key == 'kv_lora_rank' else 128}."
            )
