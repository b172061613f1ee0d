"""Check answers that users published, or that the trainer's own rules give."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import QUIET, Command

FEW = ("search.num_steps=10", "search.num_restarts=2", *QUIET)
TRAINERS_WITH_EVEN_HEADS = ("torchtitan", "deepspeed", "accelerate")


def hf_file(folder: Path, name: str, **values: Any) -> str:
    """Write a file of Hugging Face into a folder; return the override that names the folder."""
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(values))
    return f"model.path={name}"


def llama_like(**values: Any) -> dict[str, Any]:
    """Sizes of TinyLlama, as its file has them, but for `values`."""
    sizes: dict[str, Any] = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632}
    sizes |= {"num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False}
    return sizes | values


@pytest.mark.parametrize("trainer", ["none", "megatron"])
@pytest.mark.parametrize(("key", "value"), [("cp", "2"), ("grad_comm_bits", "[16,8]")])
def test_a_plan_with_the_pin_and_files_whatever_other_trainers_lack(
    key: str, value: str, trainer: str, command: Command
) -> None:
    """Case 01: a plan with cp=2, and one where gradients may have 8 bits."""
    job = ("model=llama3_8b", "cluster=h100_8x8", "space=uniform", "pp=2", f"trainer={trainer}")
    outcome = command(*job, f"space.{key}={value}", *FEW)
    assert outcome.status == 0, outcome.err
    if key == "cp":
        assert json.loads(command.plan_file().read_text())["parallelism"]["cp"] == 2


QWEN_3B = {
    "model_type": "qwen2",
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
def test_megatron_has_tp_above_the_key_value_heads_and_others_refuse_it(
    command: Command, tmp_path: Path
) -> None:
    """Case 09: query groups are a multiple or divisor of tp (Megatron-LM), not so for the others."""
    moe = ("model=qwen3_30b_a3b", "seq=4096", "gbs=64", "tp=8", "pp=1", "space.ep=8", "mbs=1")
    dense = ("model=hf", hf_file(tmp_path, "qwen25_3b", **llama_like(**QWEN_3B)), "seq=2048")
    node = ("price", "cluster=h100_1x8", *FEW)
    for number, job in enumerate((moe, (*dense, "tp=4", "pp=1", "dp=2", "zero=1"))):
        outcome = command(*node, *job, "trainer=megatron", f"hydra.run.dir=own{number}")
        assert outcome.status == 0, outcome.err
    for trainer in TRAINERS_WITH_EVEN_HEADS:
        refused = command(*node, *moe, f"trainer={trainer}")
        assert refused.status == 2
        assert "must divide the heads, the KV heads" in refused.err


def test_nanotron_names_the_micro_batches_that_its_1f1b_wants(
    command: Command, tmp_path: Path
) -> None:
    """Case 14, huggingface/nanotron#347: at least pp - 1 micro-batches, recompute pinned or not."""
    job = ("model=hf", hf_file(tmp_path, "tinyllama", **llama_like()), "trainer=nanotron")
    pins = ("seq=2048", "gbs=1", "tp=1", "pp=8", "mbs=1", "zero=0", *QUIET)
    for recompute in ((), ("recompute=none",)):
        outcome = command("price", "cluster=h100_1x8", *job, *pins, *recompute)
        assert outcome.status == 2
        assert "at least pp - 1 micro-batches" in outcome.err
        assert "tokens.batch_accumulation_per_replica" in outcome.err
        assert "recomputes whole layers" not in outcome.err


def test_the_report_says_that_a_vision_tower_is_not_priced(
    command: Command, tmp_path: Path
) -> None:
    """Case 16: Qwen3-VL 8B has a tower of 0.58 B parameters."""
    tower = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }
    sizes = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    }
    file = {"model_type": "qwen3_vl", "text_config": llama_like(**sizes), "vision_config": tower}
    job = ("model=hf", hf_file(tmp_path, "qwen3_vl_8b", **file), "cluster=h100_1x8")
    outcome = command(*job, "seq=4096", "space=uniform", *FEW)
    assert outcome.status == 0, outcome.err
    (named,) = [line for line in outcome.out.splitlines() if "vision" in line]
    parameters = named.partition("vision (")[2].partition(" parameters")[0]
    assert round(int(parameters.replace(",", "")) / 1e9, 2) == 0.58
    assert "not priced" in named


def test_price_takes_ep_as_tp_and_pp(command: Command) -> None:
    """Case 17."""
    job = ("model=qwen3_30b_a3b", "cluster=h100_8x8", "tp=2", "pp=2", "ep=8", "mbs=1")
    outcome = command("price", *job, *FEW)
    assert outcome.status == 0, outcome.err
    plan = json.loads(command.plan_file().read_text())["parallelism"]
    assert (plan["tp"], plan["pp"], plan["ep"]) == (2, 2, 8)


def test_a_cluster_of_unlike_gpus_says_what_is_not_searched(command: Command) -> None:
    """Case 24: batches of unlike sizes on unlike GPUs, or their common ZeRO-3."""
    outcome = command("model=toy", "cluster=toy_mixed", "space.pp=1", *FEW)
    assert outcome.status == 2
    assert "data and tensor parallelism over unlike nodes are not searched" in outcome.err
