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


def model_of(values: Values) -> ModelConfig:
    return ModelConfig(**model_fields(values, "model.path=config.json", "m"))


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
    file = model_of(
        {"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
         "num_attention_heads": 16}
    )  # fmt: skip
    h, vocab = preset.hidden_size, preset.vocab_size
    # token types and the output's bias; embedding norm and final norm are as many
    assert Model(file, True).num_parameters - Model(preset, True).num_parameters == 2 * h + vocab
    assert Path(config_dir(), "model", "hf.yaml").is_file()
