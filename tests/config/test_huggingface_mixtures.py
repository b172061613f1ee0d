"""Configurations of mixtures of experts; their parameters are counted in `test_huggingface_counts.py`."""

from typing import Any

import pytest

from darts_parallel.config.huggingface import model_fields
from darts_parallel.errors import ConfigError, UnsupportedError


def test_the_language_model_of_a_multimodal_mixture_is_read() -> None:
    values = {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2}
    nested = {"model_type": "llama4", "text_config": values}
    assert model_fields(nested, "config.json", "m") == model_fields(values, "config.json", "m")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias=True beside experts"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias=False beside experts"),
        ({"model_type": "dbrx", "num_experts": 16}, "not modelled for it; try one of mixtral"),
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
