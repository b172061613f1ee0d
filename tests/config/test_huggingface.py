import json
from pathlib import Path
from typing import Any

import pytest

from darts_parallel.config.composition import load_config
from darts_parallel.config.huggingface import model_fields
from darts_parallel.config.model import ModelConfig
from darts_parallel.config.schema import config_dir
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.problem.model import Model
from darts_parallel.problem.problem import load_problem
from tests.support.commands import Command

Values = dict[str, Any]


def rotary(kind: str, h: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> Values:
    return {
        "model_type": kind,
        "hidden_size": h,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


def neox(h: int, layers: int, heads: int, vocab: int) -> Values:
    return {
        "model_type": "gpt_neox",
        "hidden_size": h,
        "intermediate_size": 4 * h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
    }


def t5(d: int, ff: int, layers: int, heads: int, **more: Any) -> Values:
    return {"model_type": "t5", "d_model": d, "d_ff": ff, "num_layers": layers, "num_heads": heads, **more}


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# sizes: each model's config.json; totals: its safetensors metadata or model card on huggingface.co.
# Pythia: table in the suite's model cards; GPT-NeoX-20B: Black et al. 2022 (arXiv 2204.06745);
# BERT: the published model with its masked-language head (BertForMaskedLM), without pooler.
# Qwen3-0.6B and 1.7B tie their tables: the cards' "0.6B" and "1.7B" count them once.
PUBLISHED: dict[str, tuple[int, Values]] = {
    "meta-llama/Llama-2-7b-hf": (6_738_415_616, {"model_type": "llama", "vocab_size": 32000}),
    "meta-llama/Llama-2-13b-hf": (13_015_864_320, rotary("llama", 5120, 13824, 40, 40, 40, 32000)),
    "meta-llama/Llama-3.2-1B": (
        1_235_814_400,
        rotary("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    ),
    "TinyLlama/TinyLlama-1.1B": (1_100_048_384, rotary("llama", 2048, 5632, 22, 32, 4, 32000)),
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, {"model_type": "mistral"}),
    "Qwen/Qwen2-0.5B": (
        494_032_768,
        rotary("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    ),
    "Qwen/Qwen2-7B": (7_615_616_512, rotary("qwen2", 3584, 18944, 28, 28, 4, 152064)),
    "Qwen/Qwen3-0.6B": (
        596_049_920,
        rotary("qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True),
    ),
    "Qwen/Qwen3-8B": (8_190_735_360, rotary("qwen3", 4096, 12288, 36, 32, 8, 151936)),
    "openai-community/gpt2": (124_439_808, {"model_type": "gpt2"}),
    "openai-community/gpt2-large": (
        774_030_080,
        {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    ),
    "EleutherAI/pythia-70m": (70_426_624, neox(512, 6, 8, 50304)),
    "EleutherAI/pythia-12b": (11_846_072_320, neox(5120, 36, 40, 50688)),
    "EleutherAI/gpt-neox-20b": (20_554_567_680, {"model_type": "gpt_neox"}),
    "google-bert/bert-base-uncased": (109_514_298, {"model_type": "bert"}),
    "google-bert/bert-large-uncased": (
        335_174_458,
        {"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
         "num_attention_heads": 16},
    ),
    "google-t5/t5-small": (60_506_624, {"model_type": "t5"}),
    "google-t5/t5-large": (737_668_096, t5(1024, 4096, 24, 16)),
    "google/t5-v1_1-base": (247_577_856, t5(768, 2048, 12, 12, **GATED)),
    "google/flan-t5-small": (76_961_152, t5(512, 1024, 8, 6, **GATED)),
}  # fmt: skip


def model_of(values: Values) -> ModelConfig:
    return ModelConfig(**model_fields(values, "model.path=config.json", "m"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_hugging_face_model_are_the_published_ones(name: str) -> None:
    published, values = PUBLISHED[name]
    assert Model(model_of(values), True).num_parameters == published


def test_defaults_of_a_class_stand_where_the_file_is_silent_and_null_means_as_many_as_heads() -> None:
    mistral = model_of({"model_type": "mistral"})
    assert (mistral.num_kv_heads, mistral.max_seq_len, mistral.gated_mlp) == (8, 131072, True)
    assert model_of({"model_type": "mistral", "num_key_value_heads": None}).num_kv_heads is None
    assert model_of({"model_type": "t5", "d_kv": 32}).head_dim == 32
    assert model_of({"model_type": "t5", "num_decoder_layers": 2}).num_layers == 8
    assert model_of({"model_type": "qwen3"}).head_dim == 128


def test_the_language_model_of_a_multimodal_one_is_its_text_config() -> None:
    text = {"model_type": "llama", "num_hidden_layers": 3}
    outer = {"model_type": "llava", "_name_or_path": "org/llava-3", "text_config": text}
    config = model_of(outer)
    assert (config.num_layers, config.name) == (3, "llava-3")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "jetmoe", "num_local_experts": 8}, "num_local_experts=8 experts a layer"),
        ({"model_type": "dbrx", "num_experts": 128}, "num_experts=128"),
    ],
)
def test_what_is_not_modelled_is_named(values: Values, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        model_of(values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": "rwkv"}, "fields name, num_layers, hidden_size, num_heads, vocab_size, max_seq_len"),
        ({}, "model_type=None must be one of llama"),
        ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size='4096' must be a whole number"),
        ({"model_type": "llama", "hidden_size": None}, "hidden_size is missing"),
        ({"model_type": "gpt2", "resid_pdrop": "no"}, "resid_pdrop='no' must be a number"),
        ({"model_type": "llama", "mlp_bias": 2}, "mlp_bias=2 must be true or false"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_model_says_why(values: Values, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        model_of(values)


def test_the_configuration_holds_the_sizes_and_no_longer_needs_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(rotary("llama", 64, 128, 4, 4, 2, 256)))
    given = ["model=hf", f"model.path={folder}", "cluster=toy", "training=toy", "model.num_layers=6"]
    config = load_config(given)
    assert config.model.path is None
    assert (config.model.name, config.model.num_layers, config.model.num_kv_heads) == ("tiny-llama", 6, 2)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_problem(given)


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
    file.write_text(json.dumps(rotary("qwen3", 64, 128, 4, 4, 2, 256, head_dim=16)))
    few = ("search.num_steps=10", "search.num_restarts=2", "verification.enabled=false")
    outcome = command("model=hf", "cluster=toy", "training=toy", "output.tensorboard=false", *few)
    assert outcome.status == 0, outcome.err
    plan = json.loads(command.plan_file().read_text())
    assert plan["model"]["qk_norm"]
    assert plan["config"]["model"]["path"] is None


def test_bert_preset_and_bert_file_differ_by_what_the_preset_leaves_out() -> None:
    preset = load_config(["model=bert_345m", "training=bert_345m"], None).model
    file = model_of(PUBLISHED["google-bert/bert-large-uncased"][1])
    h, vocab = preset.hidden_size, preset.vocab_size
    # token types and the output's bias; embedding norm and final norm are as many
    assert Model(file, True).num_parameters - Model(preset, True).num_parameters == 2 * h + vocab
    assert Path(config_dir(), "model", "hf.yaml").is_file()
