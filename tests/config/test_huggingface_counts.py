"""Parameters read of a file against published totals, and against the real class of `transformers`.

`huggingface_counts.json` holds configurations, sizes being those of the published config.json, with what
`AutoModel....from_config` of the named version counted on the meta device (its class is named beside it), or
with the total that was `published` and where.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.config.huggingface import READERS, model_fields
from darts_parallel.config.model import MAX_SIZE, ModelConfig
from darts_parallel.errors import UnsupportedError
from darts_parallel.problem.model import Model

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("huggingface_counts.json").read_text())
T5_LARGE = {"model_type": "t5", "d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16,
            "feed_forward_proj": "gated-gelu"}  # fmt: skip


def read(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**model_fields(values, "model.path=config.json", "m"))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_parameters_are_those_of_the_real_class(row: dict[str, Any]) -> None:
    assert Model(read(row["config"]), True).num_parameters == row["parameters"]


def test_every_family_is_pinned_but_for_further_names_of_one() -> None:
    named_again = {"kimi_k2", "llama4", "ministral", "qwen2_5_vl"}
    assert set(READERS) - {row["config"]["model_type"] for row in ROWS} == named_again | {"mt5"}  # below


@pytest.mark.parametrize("untied", [{"tie_word_embeddings": False}, {"scale_decoder_outputs": False}])
def test_the_untied_head_of_t5_is_seen_in_files_of_both_major_versions(untied: dict[str, Any]) -> None:
    # google/t5-v1_1-large: 783,150,080 parameters (safetensors metadata); tied 750,251,008
    saved = {"tie_word_embeddings": True, **untied}
    assert Model(read({**T5_LARGE, **saved}), True).num_parameters == 783_150_080
    assert Model(read(T5_LARGE), True).num_parameters == 750_251_008
    # google/mt5-small, untied: 300,176,768 (safetensors metadata)
    assert Model(read({"model_type": "mt5", **saved}), True).num_parameters == 300_176_768


def test_relative_positions_set_no_limit_to_the_sequence() -> None:
    assert read({**T5_LARGE, "n_positions": 512}).max_seq_len == MAX_SIZE


def test_rows_of_the_position_table_that_no_token_uses_are_no_positions() -> None:
    roberta = read({"model_type": "roberta", "max_position_embeddings": 514})
    assert (roberta.max_seq_len, roberta.position_offset) == (512, 2)
    opt = read({"model_type": "opt"})
    assert (opt.max_seq_len, opt.position_offset) == (2048, 2)


def test_windows_are_read_by_the_rule_of_the_class_or_layer_by_layer() -> None:
    def window(**values: Any) -> tuple[Any, Any]:
        config = read({"num_hidden_layers": 6, **values})
        return config.sliding_window, config.sliding_window_pattern

    kinds = ["sliding_attention", "full_attention", "full_attention"] * 2
    assert window(model_type="mistral") == (4096, None)
    assert window(model_type="mistral", sliding_window=None) == (None, None)
    assert window(model_type="gemma2") == (4096, 2)
    assert window(model_type="gemma3_text", sliding_window=512) == (512, 6)
    assert window(model_type="gemma3_text", sliding_window_pattern=3) == (4096, 3)
    assert window(model_type="gemma3_text", layer_types=kinds) == (4096, [1, 0, 0, 1, 0, 0])
    assert window(model_type="qwen2") == (None, None)
    assert window(model_type="qwen2", use_sliding_window=True, max_window_layers=4) == (
        4096,
        [0, 0, 0, 0, 1, 1],
    )
    assert window(model_type="gpt_oss", num_local_experts=4) == (128, 2)
    assert window(model_type="gpt_oss", num_local_experts=4, layer_types=kinds) == (128, [1, 0, 0, 1, 0, 0])
    assert window(model_type="mixtral", sliding_window=4096) == (4096, None)
    assert window(model_type="qwen3_moe", sliding_window=4096) == (None, None)
    assert window(model_type="modernbert") == (128, [0, 1, 1, 0, 1, 1])


def test_a_flat_and_a_nested_file_of_one_model_read_the_same() -> None:
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
    nested = read({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **text}})
    assert nested == read({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, **text})
    assert nested == read({"model_type": "qwen2_5_vl", "text_config": text})


def test_a_pattern_reads_the_same_as_text_and_as_words() -> None:
    words = ["linear_attention", "mlp", "full_attention", "mamba", "attention"]
    text = read({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*M*"})
    assert text == read({"model_type": "nemotron_h", "layers_block_type": words})
    assert text.num_layers == 5
    jamba = {"model_type": "jamba", "num_hidden_layers": 4, "num_experts": 1, "attn_layer_period": 4,
             "attn_layer_offset": 2}  # fmt: skip
    assert read(jamba).hybrid_override_pattern == "M-M-*-M-"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim=512 beside hidden_size=768"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M", "use_bias": True}, "use_bias=True"),
        ({"model_type": "nemotron_h", "layers_block_type": ["rwkv"]}, "names rwkv"),
        ({"model_type": "jamba", "num_experts": 1, "mamba_proj_bias": True}, "mamba_proj_bias=True"),
    ],
)
def test_what_a_family_has_and_the_model_lacks_is_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        read(values)
