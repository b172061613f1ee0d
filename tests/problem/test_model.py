from dataclasses import replace
from typing import Any

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem

# published totals: the models' own safetensors indices and model cards (exact), SC21 table 1 (GPT-3),
# MegatronBert with pooler, sentence head and token types, which are not modelled (0.33 %)
NEARLY = {"gpt3_175b": (174_600_000_000, 1e-3), "bert_345m": (336_226_108, 4e-3)}
PUBLISHED = {
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "bloom_176b": 176_247_271_424,
    # classes of transformers 5.23.0 on the meta device, with the released sizes (Gemma 3: the language model)
    "nemotron_h_8b": 8_100_852_736,
    "nemotron_h_56b": 56_324_350_464,
    "gemma3_27b": 27_009_346_304,
    "jamba_3b": 3_029_337_472,
}
# totals: parameters of the classes of transformers 4.57.1, built on the meta device with these sizes; that of
# Grok-1 is ours from the released sizes (its card says 314B). Active, in billions, as the papers print them.
MIXTURES = {
    "mixtral_8x7b": (46_702_792_704, 12.9, 0.1),
    "mixtral_8x22b": (140_620_634_112, 39.0, 0.2),
    "qwen3_30b_a3b": (30_532_122_624, 3.3, 0.1),
    "qwen3_235b_a22b": (235_093_634_560, 22.0, 0.3),
    "qwen2_57b_a14b": (57_408_658_944, 14.0, 0.3),
    "deepseek_v3": (671_026_404_352, 37.0, 0.7),
    "kimi_k2": (1_026_408_209_408, 32.6, 0.4),
    "llama4_maverick": (400_711_848_960, 17.0, 0.3),
    "gpt_oss_20b": (20_914_757_184, 3.61 + 0.58, 0.01),
    "gpt_oss_120b": (116_829_156_672, 5.13 + 0.58, 0.01),
    "nemotron3_nano_30b_a3b": (31_577_937_344, 3.2, 0.4),
    "grok1": (315_684_034_560, 314 / 4, 6.0),
}


@pytest.mark.parametrize("name", [*PUBLISHED, *NEARLY, *MIXTURES])
def test_presets_have_the_published_parameters(name: str) -> None:
    model = Model(
        load_config([f"model={name}", "training.seq_len=64", "training.precision=bf16"]).model, True
    )
    if name in NEARLY:
        assert model.num_parameters == pytest.approx(NEARLY[name][0], rel=NEARLY[name][1])
    elif name in PUBLISHED:
        assert model.num_parameters == PUBLISHED[name]
    else:
        total, active, tolerance = MIXTURES[name]
        assert model.num_parameters == total
        mixtures = [layer.experts for layer in model.layers if layer.experts is not None]
        unused = sum(own.parameters * (1 - own.top_k / own.count) for own in mixtures)
        assert (total - unused) / 1e9 == pytest.approx(active, abs=tolerance)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"hybrid_override_pattern": "M-X*"}, r"must consist of M, \*, -, E .*try M-\*"),
        ({"hybrid_override_pattern": ""}, r"try \*-\*-"),
        ({"hybrid_override_pattern": "M-*"}, "has 3 layers.*try model.num_layers=3"),
        (
            {"hybrid_override_pattern": "M-*-", "num_encoder_layers": 2},
            "num_encoder_layers=2 must go with model.hybrid_override_pattern=null; try 0",
        ),
        ({"hybrid_override_pattern": "M-*E"}, r"model.num_experts must say.*try M-\*-"),
        ({"sliding_window": 0}, "model.sliding_window=0 must be at least 1"),
        ({"sliding_window_pattern": 2}, "must go with model.sliding_window"),
        ({"sliding_window": 8, "sliding_window_pattern": [1, 0]}, r"try \[1, 0, 1, 0\]"),
        ({"sliding_window": 8, "sliding_window_pattern": "six"}, "must be a whole number"),
        ({"mtp_num_layers": 1, "causal": False}, "mtp_num_layers=1 must be 0"),
        ({"mtp_num_layers": -1}, "mtp_num_layers=-1 must be at least 0"),
        ({"mamba_state_dim": 0}, "mamba_state_dim=0 must be at least 1"),
        ({"mamba_num_heads": 0}, "mamba_num_heads=0 must be at least 1"),
        ({"num_experts": 4, "moe_router_topk": 5}, "model.moe_router_topk=5 must be at most 4"),
        (
            {"num_experts": 4, "moe_router_num_groups": 3},
            "groups=3 must divide model.num_experts=4",
        ),
        ({"num_experts": 4, "moe_layer_freq": [1, 0]}, "model.moe_layer_freq=a list of 2 must be"),
        (
            {"num_experts": 4, "moe_layer_freq": 1.5},
            "model.moe_layer_freq=1.5 must be a whole number",
        ),
        ({"num_experts": 4, "moe_layer_freq": 0}, "model.moe_layer_freq=0 must be at least 1"),
        ({"moe_ffn_hidden_size": 4}, "must go with model.num_experts"),
        ({"num_experts": 4, "kv_lora_rank": 4}, "must go with model.multi_latent_attention=true"),
        ({"num_experts": 4, "multi_latent_attention": True}, "model.kv_lora_rank must be given"),
        ({"num_experts": 4, "moe_expert_capacity_factor": 0.0}, "must be at least 1e-06"),
        ({"num_experts": 4, "first_k_dense_replace": 5}, "must be at most 4"),
        ({"num_encoder_layers": 4}, "num_encoder_layers=4 .* try 3"),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    sizes = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 256,
        "max_seq_len": 64,
    }
    with pytest.raises(ConfigError, match=sentence) as caught:
        ModelConfig(**{"name": "x", **sizes, **values})
    assert "\n" not in str(caught.value)
    assert "; try " in str(caught.value)


def test_flops_per_token_are_those_of_the_megatron_formula() -> None:
    # Narayanan et al. 2021, section 5.1: 72 l h^2 (1 + s / 6h + V / 12 l h) without recomputation
    h, layers, s, vocabulary = 512, 6, 256, 1024
    config = ModelConfig(
        name="x",
        num_layers=layers,
        hidden_size=h,
        num_heads=8,
        vocab_size=vocabulary,
        max_seq_len=s,
    )
    formula = 72 * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert Model(config, True).flops_per_token(s) == pytest.approx(formula, rel=1e-12)


def test_encoder_and_decoder_layers_differ() -> None:
    config = load_config(["model=t5_1_3b", "training=t5_1_3b"]).model
    layers = {layer.kind: layer for layer in Model(config, True).layers}
    assert layers["decoder"].parameters(0) > layers["encoder"].parameters(0)
    assert layers["decoder"].output_elements == 2 * layers["encoder"].output_elements


def test_layers_of_one_kind_are_equal_but_for_their_names() -> None:
    config = load_config(["model=t5_1_3b", "training=t5_1_3b"])
    model = Model(config.model, config.training.fused_attention)
    specs, numbers = model.kinds
    assert len(set(specs)) == len(specs) < 10 < len(numbers)
    for layer, number in zip(model.layers, numbers, strict=True):
        assert replace(specs[number], name=layer.name) == layer


def test_norms_of_the_head_are_read_and_written_and_routers_keep_theirs_next_to_adapters() -> None:
    toy = ["cluster=toy", "training=toy"]
    head = load_problem([*toy, "model=toy", "model.head_transform=true"]).model.layers[-2]
    assert head.replicated_elements == 2.0 * 2 * 64  # the final norm and that of the transform
    adapters = ["training.lora_rank=4", "training.lora_targets=[linear_proj]"]
    chains = (load_problem([*toy, "model=toy_moe", *more]).model.layers for more in ([], adapters))
    full, some = (next(layer for layer in chain if layer.experts is not None) for chain in chains)
    assert some.replicated_activation_bytes == full.replicated_activation_bytes
