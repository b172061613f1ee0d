"""Models read of Hugging Face files; `huggingface_counts.json` has published sizes and totals."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from darts_parallel.config._imported import Imported
from darts_parallel.config.composition import load_config
from darts_parallel.config.huggingface import import_model
from darts_parallel.config.model import MAX_SIZE, ModelConfig
from darts_parallel.config.schema import config_dir
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem
from darts_parallel.problem.referee import check_import
from darts_parallel.problem.state_space import state_space
from tests.support.commands import Command

pytest.importorskip("transformers")
Values = dict[str, Any]
ROWS: list[Values] = json.loads(Path(__file__).with_name("huggingface_counts.json").read_text())
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}


def imported(values: Values) -> Imported:
    model = import_model(values, "model.path=config.json", "m")
    check_import(model)
    return model


def read(kind: str, **values: Any) -> ModelConfig:
    return ModelConfig(**imported({"model_type": kind, **SIZES, **values}).fields)


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_parameters_are_the_published_ones(row: Values) -> None:
    assert (
        Model(ModelConfig(**imported(row["config"]).fields), True).num_parameters
        == row["parameters"]
    )


MIMO = {
    **{"head_dim": 24, "v_head_dim": 16, "num_attention_heads": 8, "sliding_window": 8},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def test_values_may_be_narrower_than_keys_and_windows_have_other_heads() -> None:
    """MiMo-V2-Flash: parameters and FLOP are those of the model on the meta device (`check_import`)."""
    mimo = read("mimo_v2_flash", **MIMO)
    assert (mimo.head_dim, mimo.v_head_dim) == (24, 16)
    assert (mimo.num_kv_heads, mimo.window_kv_heads, mimo.attention_sinks) == (2, 4, True)
    assert mimo.sliding_window_pattern == [0, 1, 1, 1]
    far, near = Model(mimo, True).layers[1:3]
    assert (far.cores[0].kv_heads, near.cores[0].kv_heads) == (2, 4)
    assert far.cores[0].head_dim == (24 + 16) // 2
    wide = Model(replace(mimo, v_head_dim=24), True)
    assert wide.num_parameters > Model(mimo, True).num_parameters


def test_dense_decoders_say_heads_biases_norms_and_windows() -> None:
    llama = read("llama", attention_bias=True, tie_word_embeddings=True)
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.ffn_hidden_size) == (
        4,
        2,
        16,
        128,
    )
    assert (llama.gated_mlp, llama.tie_embeddings, llama.dropout, llama.norm_bias) == (
        True,
        True,
        False,
        False,
    )
    assert (llama.linear_bias, llama.mlp_bias, llama.qkv_bias) == (False, None, True)
    gemma = read("gemma3_text", head_dim=32, sliding_window=128, num_hidden_layers=6)
    assert (gemma.block_norms, gemma.qk_norm, gemma.qk_norm_whole, gemma.head_dim) == (
        4,
        True,
        False,
        32,
    )
    assert (gemma.sliding_window, gemma.sliding_window_pattern) == (128, [1, 1, 1, 1, 1, 0])
    assert read("olmo2").qk_norm_whole
    assert read("qwen2").sliding_window is None
    assert (read("mistral", sliding_window=64).sliding_window_pattern, read("phi").block_norms) == (
        None,
        1,
    )
    gpt = ModelConfig(
        **imported({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}).fields
    )
    assert (gpt.learned_positions, gpt.max_seq_len, gpt.dropout, gpt.gated_mlp) == (
        True,
        1024,
        True,
        False,
    )
    opt = ModelConfig(**imported({"model_type": "opt"}).fields)
    assert (opt.max_seq_len, opt.position_offset) == (2048, 2)


@pytest.mark.parametrize(
    ("kind", "values", "structure"),
    [
        ("gpt_neox", {}, "use_parallel_residual"),
        ("gpt_neox", {"use_parallel_residual": False}, None),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "parallel_attn"),
        ("olmo2", {}, "norms behind attention and MLP"),
        ("exaone4", {}, "norms behind attention and MLP"),
        ("granite", {"residual_multiplier": 0.22}, "residual_multiplier"),
        ("modernbert", {}, "LayerNorm without bias"),
        ("gemma2", {}, None),
        ("starcoder2", {}, None),
        ("llama", {}, None),
    ],
)
def test_forms_of_blocks_without_a_price_are_read(
    kind: str, values: Values, structure: str | None
) -> None:
    """As their classes compute (transformers, modeling_KIND.py): Megatron-LM has no flag for any of them."""
    sizes = {**SIZES, "sliding_window": 64, "pad_token_id": 0, **values}
    assert import_model({"model_type": kind, **sizes}, "p", "m").fields["structure"] == structure


def test_a_protein_model_has_its_published_parameters_and_its_contacts_have_no_price() -> None:
    """facebook/esm2_t33_650M_UR50D: 651,043,254 parameters, of which 661 predict contacts."""
    esm = {"model_type": "esm", "hidden_size": 1280, "intermediate_size": 5120, "vocab_size": 33}
    esm |= {"num_hidden_layers": 33, "num_attention_heads": 20, "max_position_embeddings": 1026}
    esm |= {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32}
    model = import_model(esm, "p", "m")
    assert model.parameters == 651_043_254
    assert "+661 parameters" in check_import(model)


def test_a_window_without_a_causal_mask_has_two_sides() -> None:
    """ModernBERT's local_attention=128 is 64 tokens on each side (masking_utils.py: |q - k| <= 64)."""
    values = {"model_type": "modernbert", "local_attention": 128}
    assert import_model(values, "p", "m").fields["sliding_window"] == 129


def test_experts_latent_attention_and_routing() -> None:
    mixtral = read("mixtral", num_local_experts=4)
    assert (mixtral.num_experts, mixtral.moe_router_topk, mixtral.moe_ffn_hidden_size) == (
        4,
        2,
        128,
    )
    experts = {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    deepseek = read("deepseek_v3", **LATENT, **experts)
    assert (deepseek.multi_latent_attention, deepseek.kv_lora_rank, deepseek.mtp_num_layers) == (
        True,
        16,
        0,
    )
    assert (deepseek.moe_layer_freq, deepseek.moe_shared_expert_intermediate_size) == (
        [0, 1, 1, 1],
        32,
    )
    assert (deepseek.moe_router_num_groups, deepseek.moe_router_group_topk) == (4, 2)
    assert deepseek.moe_router_enable_expert_bias
    sinks = read("gpt_oss", num_local_experts=4, head_dim=16)
    assert (sinks.attention_sinks, sinks.moe_router_bias, sinks.linear_bias) == (True, True, True)
    llama4 = {
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
    }
    scout = read("llama4_text", **llama4, attention_chunk_size=4096)
    assert scout.moe_layer_freq == [0, 1, 0, 1]
    assert scout.moe_router_score_function == "sigmoid"
    assert scout.not_priced == "chunks of attention, above 4,096 tokens"
    assert read("mixtral", num_local_experts=4).moe_router_score_function is None


def test_encoders_decoders_and_hybrids() -> None:
    t5 = ModelConfig(
        **imported({"model_type": "t5", "num_decoder_layers": 2, "vocab_size": 256}).fields
    )
    assert (t5.num_layers, t5.num_encoder_layers, t5.relative_position_buckets) == (8, 6, 32)
    assert (t5.max_seq_len, t5.head_dim) == (MAX_SIZE, 64)
    released = read("t5", num_decoder_layers=2, n_positions=512)
    assert (
        released.max_seq_len == 512
    )  # its relative positions take more; nobody pre-trains it longer
    bert = read("bert")
    assert (bert.causal, bert.head_transform, bert.output_bias, bert.token_types) == (
        False,
        True,
        True,
        2,
    )
    roberta = read("roberta", max_position_embeddings=514, pad_token_id=1)
    assert (roberta.max_seq_len, roberta.position_offset) == (512, 2)
    assert not read("modernbert", pad_token_id=0).embedding_norm
    jamba = read(
        "jamba", num_experts=1, num_experts_per_tok=1, attn_layer_period=4, attn_layer_offset=2
    )
    assert jamba.hybrid_override_pattern == "M-M-*-M-"
    nemotron = {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
    }
    assert (
        read("nemotron_h", hybrid_override_pattern="M-M*", **nemotron).hybrid_override_pattern
        == "M-M*"
    )


LATENT_CARDS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2")
CARDS = (
    "afmoe",
    "apertus",
    "cohere2",
    "ernie4_5_moe",
    "exaone4",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granitemoehybrid",
    "laguna",
    "ministral3",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "xlm-roberta",
    *LATENT_CARDS,
)


@pytest.mark.parametrize("kind", CARDS)
def test_models_that_people_train_are_read(kind: str) -> None:
    latent = {**LATENT, "index_n_heads": 2, "index_head_dim": 16}
    model = read(kind, **(latent if kind in LATENT_CARDS else {"head_dim": 16}))
    assert (model.hidden_size, model.vocab_size) == (64, 256)
    assert (model.attention_gate_size is not None) == (kind in ("afmoe", "laguna"))
    assert (model.indexer_head_dim is not None) == (kind in ("deepseek_v32", "glm_moe_dsa"))
    assert model.activation_parameters == 2 * (kind == "apertus")


def test_norms_without_weights_and_the_first_mamba() -> None:
    olmo, mamba = (
        read("olmo"),
        ModelConfig(**imported({"model_type": "mamba", "num_hidden_layers": 1}).fields),
    )
    assert (olmo.norm_scale, olmo.final_norm, olmo.block_norms) == (False, True, None)
    assert (mamba.hybrid_override_pattern, mamba.mamba_inner_norms, mamba.mamba_dt_rank) == (
        "M",
        False,
        48,
    )


def test_the_language_model_of_a_multimodal_one_is_its_text_config() -> None:
    text = {"model_type": "llama", **SIZES, "num_hidden_layers": 3}
    model = imported({"model_type": "llava", "_name_or_path": "org/llava-3", "text_config": text})
    assert (model.fields["num_layers"], model.fields["name"]) == (3, "llava-3")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"model_type": "gemma3n_text"}, r"altup \(Gemma3nTextAltUp\)"),
        ({"model_type": "albert"}, r"attention.LayerNorm \(LayerNorm\)"),
        ({"model_type": "whisper"}, r"\(Whisper.*|k_proj"),
        ({"model_type": "switch_transformers"}, "cannot be counted on the meta device"),
        ({"model_type": "vit", "hidden_size": 32}, "it is no language model"),
    ],
)
def test_a_part_that_is_not_modelled_is_named(values: Values, part: str) -> None:
    with pytest.raises(UnsupportedError, match=part):
        imported(values)


def test_the_referee_catches_layers_that_are_read_wrongly() -> None:
    model = imported({"model_type": "llama", **SIZES})
    wider = replace(model, fields={**model.fields, "ffn_hidden_size": 136})
    with pytest.raises(
        UnsupportedError, match=r"model.layers.0 \(LlamaDecoderLayer\) .* parameters, the"
    ):
        check_import(wider)
    experts = imported({"model_type": "mixtral", **SIZES, "num_local_experts": 4})
    with pytest.raises(UnsupportedError, match="matrix FLOP for 256 tokens, the priced layers"):
        check_import(replace(experts, fields={**experts.fields, "moe_router_topk": 3}))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "unheard_of"}, "model_type=unheard_of is unknown to transformers"),
        ({}, "model_type=None is unknown"),
        ({"model_type": [None]}, r"model_type=\[None\] is unknown"),
        ({"model_type": "llama", "hidden_size": "4096"}, "is no configuration of model_type=llama"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_model_says_why(values: Values, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        import_model(values, "model.path=config.json", "m")


def test_without_transformers_one_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "darts_parallel.config._meta_model", raising=False)
    with pytest.raises(UnsupportedError, match="pip install 'transformers>=5"):
        import_model({"model_type": "llama"}, "model.path=config.json", "m")


def test_the_configuration_holds_the_sizes_and_no_longer_needs_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **SIZES}))
    given = [
        "model=hf",
        f"model.path={folder}",
        "cluster=toy",
        "training=toy",
        "model.num_layers=6",
    ]
    config = load_config(given)
    assert config.model.path is None
    assert (config.model.name, config.model.num_layers, config.model.num_kv_heads) == (
        "tiny-llama",
        6,
        2,
    )
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_problem(given)
    assert Path(config_dir(), "model", "hf.yaml").is_file()


def test_the_path_counts_from_where_the_command_runs(command: Command) -> None:
    missing = command("model=hf")
    assert missing.status == 2
    assert "model.path=config.json cannot be read" in missing.err
    assert not missing.files
    file = command.folder / "config.json"
    file.write_text("{]")
    assert "is not valid JSON" in command("model=hf").err
    file.write_text("[]")
    assert "must hold a JSON object" in command("model=hf").err
    file.write_text(json.dumps({"model_type": "nobody"}))
    assert "model_type=nobody is unknown to transformers" in command("model=hf").err
    file.write_text(json.dumps({"model_type": "qwen3", **SIZES, "head_dim": 16}))
    few = (
        "space=uniform",
        "search.num_steps=2",
        "search.num_restarts=2",
        "verification.enabled=false",
    )
    outcome = command("model=hf", "cluster=toy", "training=toy", "output.tensorboard=false", *few)
    assert outcome.status == 0, outcome.err
    plan = json.loads(command.plan_file().read_text())
    assert plan["model"]["qk_norm"]
    assert plan["config"]["model"]["path"] is None


GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
    **{"attention_k_eq_v": True, "sliding_window": 8, "hidden_size_per_layer_input": 0},
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}


def test_windowed_blocks_may_have_smaller_heads_and_keys_may_be_values() -> None:
    """Gemma 4: parameters and FLOP are those of the model on the meta device (`check_import`)."""
    gemma = read("gemma4_text", **GEMMA4)
    assert (gemma.head_dim, gemma.window_head_dim) == (32, 16)
    assert (gemma.num_kv_heads, gemma.window_kv_heads, gemma.shared_key_values) == (1, 2, True)
    near, far = Model(gemma, True).layers[3:5]
    assert (near.cores[0].head_dim, far.cores[0].head_dim) == (16, 32)
    # queries of 4 heads; in windows 2 heads of keys and of values, else one head that is both
    assert [near.gemms[0].out_features, far.gemms[0].out_features] == [
        (4 + 2 + 2) * 16,
        (4 + 1) * 32,
    ]


def test_gemma_4_has_experts_next_to_its_mlp() -> None:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
    file = {"model_type": "gemma4_text", **SIZES, **GEMMA4, **experts, "moe_intermediate_size": 32}
    gemma = ModelConfig(**imported(file).fields)
    assert (gemma.num_experts, gemma.moe_router_topk, gemma.moe_ffn_hidden_size) == (8, 2, 32)
    assert (gemma.moe_shared_expert_intermediate_size, gemma.block_norms) == (128, 7)


def test_a_few_parameters_without_a_price_are_named_and_many_are_refused() -> None:
    file = {"model_type": "blenderbot-small", "d_model": 64, "vocab_size": 256}
    named = check_import(import_model(file, "model.path=config.json", "m"))
    # each of two stacks has a norm behind its embedding, and no final norm
    assert re.fullmatch(
        r"a difference of [+-]\d+ parameters, the first in what .* its blocks", named
    )
    half = import_model(file, "model.path=config.json", "m")
    for share, refused in ((1.0009, False), (1.0011, True)):
        more = replace(half, parameters=round(half.parameters * share))
        if refused:
            with pytest.raises(UnsupportedError, match="is not modelled"):
                check_import(more)
        else:
            assert "parameters, the first in" in check_import(more)


def test_the_model_of_a_job_names_its_parameters_without_a_price(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "blenderbot-small", "d_model": 64, "vocab_size": 256})
    )
    model = load_problem(["model=hf", f"model.path={file}"]).config.model
    assert "parameters, the first in what stands outside" in (model.not_priced or "")


def test_a_convolution_outside_of_a_state_space_is_refused() -> None:
    """The search for its output product ended nowhere."""
    with pytest.raises(UnsupportedError, match="Conv2d"):
        import_model({"model_type": "nystromformer"}, "model.path=config.json", "m")


def test_the_epsilon_of_norms_and_the_base_of_positions_are_read() -> None:
    llama = read("llama", rms_norm_eps=1e-6, rope_theta=500000.0)
    assert (llama.norm_epsilon, llama.rotary_base) == (1e-6, 500000.0)
    assert read("mistral", rope_theta=1e8).rotary_base == 1e8  # Mistral Small 3
    gpt2 = ModelConfig(**imported({"model_type": "gpt2"}).fields)
    assert (gpt2.norm_epsilon, gpt2.rotary_base) == (1e-5, None)


def test_lists_of_equal_numbers_are_read_as_one_number() -> None:
    """Hunyuan-A13B's published file gives 32 times 8 experts a token: 80,393,183,232 parameters."""
    hunyuan = {
        "model_type": "hunyuan_v1_moe",
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts": 64,
        "moe_topk": [8] * 32,
        "num_shared_expert": [1] * 32,
        "moe_intermediate_size": [3072] * 32,
        "use_qk_norm": True,
        "vocab_size": 128167,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    model = ModelConfig(**imported(hunyuan).fields)
    assert model.moe_router_topk == 8
    assert Model(model, True).num_parameters == 80_393_183_232


def test_a_vision_tower_is_named_with_its_parameters() -> None:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [],
    }
    file = {"model_type": "qwen3_vl", "text_config": SIZES, "vision_config": vision}
    named = imported(file).fields["not_priced"]
    tower = re.fullmatch(r"vision \(([\d,]+) parameters\)", named)
    assert tower is not None
    # a patch of 3 x 2 x 16 x 16 numbers, two blocks and the merger of 2 x 2 patches
    assert int(tower[1].replace(",", "")) > 3 * 2 * 16 * 16 * 32 + 2 * 12 * 32 * 32


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "must be at most 1024"),
        ({"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 10**9}}, "at most 1024"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer=1000000000 must be at most 1024"),
        ({"model_type": "llama", "text_config": SIZES}, "reads no text_config in that place"),
        ({"model_type": "qwen3_vl", "text_config": {"text_config": SIZES}}, "reads no text_config"),
        ({"model_type": "ours", "auto_map": {}}, r"the file's own code \(auto_map\) is not run"),
        (
            {
                "model_type": "bailing_moe",
                "num_experts_per_tok": 8,
                "use_qk_norm": True,
                "n_group": 8,
            },
            "try a copy with model_type=glm4_moe",
        ),
        ({"model_type": "llada", "hidden_size": 4096}, "try a copy with model_type=llama"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(values: Values, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        import_model(values, "model.path=config.json", "m")
    assert "\n" not in str(refused.value)


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3_5_text", {"intermediate_size": 96}),
        ("qwen3_next", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
    ],
)
def test_gated_delta_nets_are_read(kind: str, more: Values) -> None:
    """Three of four blocks; queries and their gate are one product of the fourth."""
    found = read(kind, head_dim=16, **DELTA, **more)
    assert found.hybrid_override_pattern is not None
    assert found.hybrid_override_pattern[::2] == "MMM*"
    assert (found.mamba_delta_rule, found.attention_gate_size) == (True, 4 * 16)
    assert (found.mamba_num_heads, found.mamba_num_groups, found.mamba_state_dim) == (4, 2, 16)


def test_a_delta_nets_scan_has_the_products_of_its_chunked_form() -> None:
    """Torch counts all products but those with the inverse of a triangle, for which it calls a solver."""
    from transformers.models.qwen3_next import modeling_qwen3_next as published

    tokens, heads, keys, values, chunk = 128, 4, 16, 8, 64
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), counter:
        query, key = (torch.zeros(1, tokens, heads, keys) for _ in range(2))
        value = torch.zeros(1, tokens, heads, values)
        decay, beta = (torch.zeros(1, tokens, heads) for _ in range(2))
        published.torch_chunk_gated_delta_rule(query, key, value, decay, beta, chunk_size=chunk)
    config = read("qwen3_next", head_dim=16, num_experts=4, num_experts_per_tok=2, **DELTA)
    scan = state_space(config).scan
    assert scan is not None
    inverse = heads * (chunk**2 / 3 + 2 * chunk * (keys + values))
    assert scan.flops - inverse == pytest.approx(counter.get_total_flops() / tokens)


def test_a_gated_short_convolution_is_read() -> None:
    """LFM2: the norm behind the blocks is called embedding_norm, and experts come after dense blocks."""
    kinds = ["conv", "conv", "full_attention", "conv"]
    found = read("lfm2", layer_types=kinds, conv_bias=True)
    assert found.hybrid_override_pattern == "M-M-*-M-"
    assert (found.mamba_short_conv, found.mamba_conv_kernel) == (True, 3)
    assert (found.final_norm, found.embedding_norm) == (True, False)
    sparse = {"num_experts": 4, "moe_intermediate_size": 32, "num_dense_layers": 1}
    found = read("lfm2_moe", layer_types=kinds, num_experts_per_tok=2, **sparse)
    assert found.hybrid_override_pattern == "M-ME*EME"


def test_kimi_delta_attention_is_read() -> None:
    sizes = {"linear_num_heads": 4, "linear_head_dim": 16, "kv_lora_rank": 16, "v_head_dim": 16}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "num_key_value_heads": 4}
    sparse = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_token": 2}
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    found = read("kimi_linear", layer_types=kinds, **sizes, **heads, **sparse)
    assert found.hybrid_override_pattern is not None
    assert [kind for kind in found.hybrid_override_pattern if kind in "M*"] == list("MM*M")
    assert (found.mamba_delta_rule, found.mamba_gate_rank, found.mamba_num_groups) == (True, 16, 4)
    assert found.multi_latent_attention


def test_falcon_h1_has_attention_next_to_mamba_behind_one_norm() -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    found = read("falcon_h1", head_dim=16, mamba_n_groups=1, **sizes)
    assert found.hybrid_override_pattern == "M*-" * 4
    assert (found.mamba_shares_norm, found.mamba_inner_norms) == (True, False)


def test_the_router_is_told_from_a_shared_expert_as_wide() -> None:
    wide = {"num_experts": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    found = read("qwen3_next", head_dim=16, num_experts_per_tok=2, **DELTA, **wide)
    assert (found.num_experts, found.moe_shared_expert_intermediate_size) == (32, 32)
    assert found.moe_shared_expert_gate
