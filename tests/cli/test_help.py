"""The help: commands, groups, words and keys, fast and complete."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from darts_parallel.cli._arguments import with_keys
from darts_parallel.cli._help import COMMANDS, GROUPS, help_lines, keys_about
from darts_parallel.config.composition import load_config
from darts_parallel.config.reference import KeyDoc, key_docs
from darts_parallel.config.schema import config_dir
from darts_parallel.config.words import NAMES, WORDS
from darts_parallel.errors import ConfigError
from tests.support.commands import Command

SYNONYMS = {name: word for name, word in NAMES["keys"].items() if word in WORDS}
TORCHLESS = """
import sys
sys.argv = ["darts-parallel", *{arguments!r}]
from darts_parallel.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 2
assert "torch" not in sys.modules
"""


def test_the_overview_fits_a_screen_and_names_every_command_and_group() -> None:
    lines = help_lines(["--help"])
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert all(f"\n  {name} " in text for name in (*COMMANDS, *WORDS))
    folders = {path.name for path in Path(config_dir()).iterdir() if path.is_dir()}
    assert folders - set(GROUPS) == {"design"}  # a command of its own reads its files


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("models", "deepseek_v3 61 layers × 7,168 · 256 experts · 163,840 tokens"),
        ("models", "hf sizes of a file of your own"),
        ("clusters", "a10_a100_mixed 1 × 4 a100_40 + 3 × 4 a10"),
        ("devices", "rtx4090 24 GiB at 1,008 GB/s · 165.2 TFLOP/s bf16"),
        ("trainers", "megatron Megatron-LM, by its flags (megatron/training/arguments.py)."),
    ],
)
def test_a_list_names_every_file_with_its_sizes(command: Command, name: str, line: str) -> None:
    outcome = command(name)
    assert outcome.status == 0
    lines = [" ".join(row.split()) for row in outcome.out.splitlines()]
    assert line in lines
    folder = Path(config_dir()) / name.removesuffix("s")
    assert [row.split()[0] for row in lines] == sorted(path.stem for path in folder.iterdir())


def test_a_list_refuses_a_word_after_it(command: Command) -> None:
    outcome = command("models", "llama3")
    assert (outcome.status, outcome.out) == (2, "")
    assert "models llama3 must be one word, since it lists all; try models, which has llama3" in (
        outcome.err
    )
    assert command("models", "--help").status == 0


def complete(doc: KeyDoc) -> bool:
    """Return whether the meaning is there, and says what null does where null is legal."""
    says_null = re.search(r"\bnull\b", doc.meaning, re.IGNORECASE)
    return bool(doc.meaning) and (not doc.may_be_null or says_null is not None)


@pytest.mark.parametrize("doc", key_docs(), ids=lambda doc: doc.key)
def test_every_key_says_what_it_means_and_what_null_does(doc: KeyDoc) -> None:
    assert complete(doc), doc


def test_a_key_that_may_be_null_has_to_say_what_null_does() -> None:
    known = {doc.key: doc for doc in key_docs()}
    for key in ("model.num_kv_heads", "space.tp", "training.compiled", "plan"):
        assert known[key].may_be_null
        assert not complete(replace(known[key], meaning="A key."))
    assert not known["search.seed"].may_be_null


@pytest.mark.parametrize("word", [*WORDS, *SYNONYMS])
def test_every_word_stands_for_one_key_that_the_help_explains(word: str) -> None:
    (doc,) = keys_about(word)
    (line, *_) = help_lines(["--help", word])
    assert line == f"{doc.key} (or {SYNONYMS.get(word, word)})"


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("space.tp", "null: every one up to"),
        ("cluster.nodes.0.gpus", "GPUs of one node"),
        ("memory_GiB", "unit: 2^30 bytes"),
        ("gpu", "the word is required there; one of a10, a100_40, "),
        ("space", "files: executable, layerwise"),
        ("device", "cluster.devices.*.peak_TFLOPs"),
        ("tune", "--from-log"),
        ("clusters", "the NAME of cluster=NAME."),
        ("devices", "the NAME of cluster=box gpu=NAME."),
        ("trainers", "the NAME of trainer=NAME."),
        ("gbs", "default none, the group's file gives it; a whole number"),
        ("graph", "darts-parallel graph --help"),
        ("lora", "training.lora_rank"),
        ("fsdp", "space.zero_stage (or zero)"),
        ("dtype", "training.precision"),
        ("output", "output.tensorboard"),
    ],
)
def test_a_topic_is_explained(topic: str, words: str) -> None:
    assert words in " ".join(help_lines([topic, "--help"]))


@pytest.mark.parametrize(
    ("topic", "near"), [("tpp", "tp"), ("h100_8x8", "cluster"), ("rtx4090", "device")]
)
def test_an_unknown_topic_is_refused_with_the_closest_one(
    command: Command, topic: str, near: str
) -> None:
    done = command("--help", topic)
    assert (done.status, done.out) == (2, "")
    assert f"try darts-parallel --help {near}." in done.err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["help", "tp"], ["batch_size=512"], ["tp=-1"]],
)
def test_help_and_refusals_of_the_configuration_load_no_torch(arguments: list[str]) -> None:
    program = TORCHLESS.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_words_stand_for_keys_in_every_command() -> None:
    assert with_keys(["model=toy", "tp=1,2", "zero=1", "gbs=8", "x.tp=3"]) == [
        "model=toy",
        "space.tp=1,2",
        "space.zero_stage=1",
        "training.global_batch_size=8",
        "x.tp=3",
    ]
    assert with_keys(["cluster=h100_8x8", "nodes=2", "gpus=16"]) == [
        "cluster=h100_8x8",
        "cluster.nodes.0.count=2",
        "cluster.nodes.0.gpus=16",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cluster=a10_a100_mixed", "nodes=2"], "try cluster.nodes.0.count=2"),
        (["cluster=h100_8x8", "gpus=64"], "has 8; try nodes=8"),
    ],
)
def test_words_of_the_machine_are_refused_where_they_are_not_clear(
    arguments: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        with_keys(arguments)
    with pytest.raises(ConfigError, match=words):  # the same words in Python
        load_config(["model=gpt2_xl", *arguments])


def test_words_of_the_machine_are_refused_on_a_mixed_cluster_of_the_user(tmp_path: Path) -> None:
    shipped = config_dir() / "cluster/a10_a100_mixed.yaml"
    own = tmp_path / "it's mine, ü [1]"
    (own / "cluster").mkdir(parents=True)
    (own / "cluster/my_mix.yaml").write_text(shipped.read_text())
    words = ["cluster=my_mix", "nodes=2"]
    with pytest.raises(ConfigError, match=r"try cluster\.nodes\.0\.count=2"):
        with_keys([f"--config-dir={own}", *words])
    with pytest.raises(ConfigError, match=r"try cluster\.nodes\.0\.count=2"):
        load_config(["model=gpt2_xl", *words], str(own))
    assert load_config(["model=gpt2_xl", words[0]], str(own)).cluster.name == "a10_a100_mixed"


def test_the_word_of_the_field_is_answered_with_ours(command: Command) -> None:
    for given, wanted in (("batch_size=512", "gbs=512"), ("num_nodes=2", "nodes=2")):
        assert f"try {wanted}." in command(given).err
