from dataclasses import replace

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.model import ModelConfig
from darts_parallel.errors import ConfigError
from darts_parallel.problem.model import Model, build_model
from darts_parallel.problem.problem import load_problem

# published totals: the models' own safetensors indices and model cards (exact), SC21 table 1 (GPT-3),
# MegatronBert with pooler, sentence head and token types, which are not modelled (0.33 %)
PUBLISHED = {
    "gpt2_xl": (1_557_611_200, 0.0),
    "llama2_7b": (6_738_415_616, 0.0),
    "llama2_70b": (68_976_648_192, 0.0),
    "llama3_8b": (8_030_261_248, 0.0),
    "llama3_70b": (70_553_706_496, 0.0),
    "llama3_405b": (405_853_388_800, 0.0),
    "bloom_176b": (176_247_271_424, 0.0),
    "gpt3_175b": (174_600_000_000, 1e-3),
    "bert_345m": (336_226_108, 4e-3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    config = load_config([f"model={name}", "training.seq_len=64"]).model
    published, tolerance = PUBLISHED[name]
    assert Model(config, True).num_parameters == pytest.approx(published, rel=tolerance)


def test_flops_per_token_are_those_of_the_megatron_formula() -> None:
    # Narayanan et al. 2021, section 5.1: 72 l h^2 (1 + s / 6h + V / 12 l h) without recomputation
    h, layers, s, vocabulary = 512, 6, 256, 1024
    config = ModelConfig(
        name="x", num_layers=layers, hidden_size=h, num_heads=8, vocab_size=vocabulary, max_seq_len=s
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
    model = build_model(config.model, config.training)
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


def test_an_encoder_needs_a_decoder() -> None:
    with pytest.raises(ConfigError, match=r"num_encoder_layers=4 .* try 3"):
        ModelConfig(
            name="x",
            num_layers=4,
            hidden_size=8,
            num_heads=2,
            vocab_size=8,
            max_seq_len=8,
            num_encoder_layers=4,
        )
