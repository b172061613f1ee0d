"""Configurations of mixtures of experts against the parameters of the real classes."""

from typing import Any

import pytest

from darts_parallel.config.huggingface import model_fields
from darts_parallel.config.huggingface_mixtures import MIXTURES
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.problem.model import Model

# parameters of AutoModelForCausalLM.from_config of transformers 4.57.1 on the meta device, 2026-11-22
COUNTED: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral-8x22b": (
        140_620_634_112,
        {
            "model_type": "mixtral",
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
        },
    ),
    "qwen1.5-moe": (14_315_784_192, {"model_type": "qwen2_moe"}),
    "qwen2-57b": (
        57_408_658_944,
        {
            "model_type": "qwen2_moe",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "qwen3-30b": (30_532_122_624, {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}),
    "deepseek-v2-lite": (
        15_706_484_224,
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
        },
    ),
    "deepseek-v2": (
        235_741_434_880,
        {
            "model_type": "deepseek_v2",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
        },
    ),
    "deepseek-v3": (671_026_404_352, {"model_type": "deepseek_v3"}),
    "kimi-k2": (
        1_026_408_209_408,
        {
            "model_type": "deepseek_v3",
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "vocab_size": 163840,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "llama4-scout": (107_769_861_120, {"model_type": "llama4_text"}),
    "llama4-maverick": (
        400_711_848_960,
        {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2},
    ),
    "glm-4.5": (
        352_797_814_784,
        {
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "n_routed_experts": 160,
            "first_k_dense_replace": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 128,
        },
    ),
    "glm-4.5-air": (106_852_245_504, {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128}),
    "granite-3.1-3b-a800m": (
        3_298_793_472,
        {
            "model_type": "granitemoe",
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
        },
    ),
    "granite-shared": (
        2_606_217_216,
        {
            "model_type": "granitemoeshared",
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
            "shared_intermediate_size": 1024,
        },
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_real_class(name: str) -> None:
    counted, values = COUNTED[name]
    fields = model_fields(values, "config.json", name)
    assert Model(ModelConfig(**fields), fused_attention=True).num_parameters == counted


def test_every_class_of_mixtures_is_counted_or_another_name() -> None:
    counted = {values["model_type"] for _, values in COUNTED.values()}
    assert set(MIXTURES) - counted == {"kimi_k2", "llama4", "mixtral"} - counted


def test_the_language_model_of_a_multimodal_mixture_is_read() -> None:
    _, values = COUNTED["llama4-maverick"]
    nested = {"model_type": "llama4", "text_config": values}
    assert model_fields(nested, "config.json", "m") == model_fields(values, "config.json", "m")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias=True beside experts"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias=False beside experts"),
        ({"model_type": "dbrx", "num_experts": 16}, "not modelled for it; nearest legal: one of mixtral"),
    ],
)
def test_what_is_not_modelled_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        model_fields(values, "config.json", "m")


@pytest.mark.parametrize(
    ("key", "value"), [("first_k_dense_replace", -1), ("n_routed_experts", "many"), ("v_head_dim", None)]
)
def test_wrong_values_name_the_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        model_fields({"model_type": "deepseek_v3", key: value}, "config.json", "m")
