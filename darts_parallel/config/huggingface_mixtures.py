"""How each Hugging Face class of a mixture of experts writes its sizes, and its defaults.

The defaults of missing keys are those of the configuration classes of `transformers` 4.57. Multi-token
prediction modules (`num_nextn_predict_layers`) are left out, as those classes leave them out.
"""

from collections.abc import Callable
from typing import Any

from darts_parallel.config.huggingface_architectures import Reader, read_rotary
from darts_parallel.config.huggingface_classes.windows import windows
from darts_parallel.errors import ConfigError


def _experts(r: Reader, count: str, width: str, top_k: str = "num_experts_per_tok") -> dict[str, Any]:
    """The fields that every mixture has, read from its own keys."""
    return {
        "num_experts": r.integer(count),
        "moe_router_topk": r.integer(top_k),
        "moe_ffn_hidden_size": r.integer(width),
    }


def _layer_numbers(r: Reader, key: str) -> list[int] | None:
    """A list of layers; None where the file has none."""
    value = r.value(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(type(x) is not int for x in value):
        raise ConfigError(f"{r.place}: {key}={value!r} must be a list of whole numbers; try [].")
    return value


def _pattern(layers: int, has_experts: Callable[[int], bool]) -> Any:
    """`moe_layer_freq`: 1 where every layer has experts, else a list."""
    flags = [int(has_experts(i)) for i in range(layers)]
    return 1 if all(flags) else flags


def _sparse_step(r: Reader) -> Any:
    """Qwen's pattern: every `decoder_sparse_step`-th layer but for `mlp_only_layers`."""
    step, dense = r.integer("decoder_sparse_step"), _layer_numbers(r, "mlp_only_layers") or []
    return _pattern(r.integer("num_hidden_layers"), lambda i: i not in dense and (i + 1) % step == 0)


def _mixtral(r: Reader) -> dict[str, Any]:
    return read_rotary(r, **_experts(r, "num_local_experts", "intermediate_size"), **windows(r))


def _qwen2_moe(r: Reader) -> dict[str, Any]:
    return read_rotary(
        r,
        qkv_bias=True,
        moe_layer_freq=_sparse_step(r),
        moe_shared_expert_intermediate_size=r.integer("shared_expert_intermediate_size"),
        moe_shared_expert_gate=True,
        **_experts(r, "num_experts", "moe_intermediate_size"),
    )


def _qwen3_moe(r: Reader) -> dict[str, Any]:
    if r.flag("attention_bias"):
        raise r.refuse("attention_bias=True beside experts without biases is not modelled", "false")
    experts = _experts(r, "num_experts", "moe_intermediate_size")
    found = windows(r, only_if="use_sliding_window")
    return read_rotary(r, qk_norm=True, moe_layer_freq=_sparse_step(r), **experts, **found)


def _shared(r: Reader) -> dict[str, Any]:
    """Shared experts given by their number, each as wide as a routed one; the first layers are dense."""
    count = r.optional("n_shared_experts") or 0
    width = count * r.integer("moe_intermediate_size")
    return {
        "moe_shared_expert_intermediate_size": width or None,
        "first_k_dense_replace": r.whole("first_k_dense_replace"),
    }


def _groups(r: Reader) -> dict[str, Any]:
    """Routing limited to groups of experts; one group is no limit."""
    groups = r.optional("n_group") or 1
    used = r.optional("topk_group") or groups
    return {} if groups == 1 else {"moe_router_num_groups": groups, "moe_router_group_topk": used}


def _deepseek(r: Reader, **changes: Any) -> dict[str, Any]:
    if r.flag("attention_bias"):
        raise r.refuse("attention_bias=True beside experts without biases is not modelled", "false")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {key: r.integer(key) for key in sizes}
    experts = _experts(r, "n_routed_experts", "moe_intermediate_size")
    fields = read_rotary(r, **experts, **_shared(r), **latent)
    own = {"multi_latent_attention": True, "q_lora_rank": r.optional("q_lora_rank")}
    return {**fields, **_groups(r), **own, "num_kv_heads": None, "head_dim": None, **changes}


def _deepseek_v3(r: Reader) -> dict[str, Any]:
    return _deepseek(r, moe_router_enable_expert_bias=True)


def _gpt_oss(r: Reader) -> dict[str, Any]:
    if not r.flag("attention_bias"):
        raise r.refuse("attention_bias=False beside experts with biases is not modelled", "true")
    experts = _experts(r, "num_local_experts", "intermediate_size")
    own = {"linear_bias": True, "attention_sinks": True, "moe_router_bias": True}
    return read_rotary(r, **own, **experts, **windows(r, every=2))


def _llama4(r: Reader) -> dict[str, Any]:
    layers, listed = r.integer("num_hidden_layers"), _layer_numbers(r, "moe_layers")
    step = r.integer("interleave_moe_layer_step")
    experts = listed if listed else [i for i in range(layers) if (i + 1) % step == 0]
    return read_rotary(
        r,
        ffn_hidden_size=r.integer("intermediate_size_mlp"),
        moe_layer_freq=_pattern(layers, lambda i: i in experts),
        moe_shared_expert_intermediate_size=r.integer("intermediate_size"),
        **_experts(r, "num_local_experts", "intermediate_size"),
    )


def _glm4_moe(r: Reader) -> dict[str, Any]:
    return read_rotary(
        r,
        qkv_bias=r.flag("attention_bias"),
        qk_norm=r.flag("use_qk_norm"),
        moe_router_enable_expert_bias=True,
        **_experts(r, "n_routed_experts", "moe_intermediate_size"),
        **_shared(r),
        **_groups(r),
    )


def _granite_moe(r: Reader) -> dict[str, Any]:
    if r.flag("attention_bias"):
        raise r.refuse("attention_bias=True beside experts without biases is not modelled", "false")
    shared = r.optional("shared_intermediate_size") if r.text("model_type") != "granitemoe" else None
    experts = _experts(r, "num_local_experts", "intermediate_size")
    return read_rotary(r, moe_shared_expert_intermediate_size=shared, **experts)


_DEEPSEEK = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "vocab_size": 129280,
             "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
             "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
             "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
             "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096}  # fmt: skip
_GRANITE = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 2048, "num_local_experts": 8,
            "num_experts_per_tok": 2}  # fmt: skip
_LLAMA4 = {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
           "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8,
           "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1,
           "interleave_moe_layer_step": 1, "max_position_embeddings": 131072}  # fmt: skip
MIXTURES: dict[str, tuple[Callable[[Reader], dict[str, Any]], dict[str, Any]]] = {
    "mixtral": (
        _mixtral,
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
         "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        _qwen2_moe,
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768,
         "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts": 60,
         "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4},
    ),
    "qwen3_moe": (
        _qwen3_moe,
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
         "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32768,
         "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8},
    ),
    "deepseek_v2": (
        _deepseek,
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 2048, "first_k_dense_replace": 0,
         "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "moe_intermediate_size": 1407, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (_deepseek_v3, _DEEPSEEK),
    "kimi_k2": (_deepseek_v3, _DEEPSEEK),
    "gpt_oss": (
        _gpt_oss,
        {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
         "num_local_experts": 128, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
         "sliding_window": 128},
    ),
    "llama4": (_llama4, _LLAMA4),
    "llama4_text": (_llama4, _LLAMA4),
    "glm4_moe": (
        _glm4_moe,
        {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
         "num_attention_heads": 96, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
         "n_shared_experts": 1, "n_routed_experts": 128, "first_k_dense_replace": 1},
    ),
    "granitemoe": (_granite_moe, _GRANITE),
    "granitemoeshared": (_granite_moe, {**_GRANITE, "shared_intermediate_size": 1024}),
}  # fmt: skip
"""By `model_type`: how its keys read, and what they are where the file is silent."""
