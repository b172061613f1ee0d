"""Batch and length that a model without a job of its own gets."""

import json
from pathlib import Path

import pytest

from darts_parallel.config.composition import load_config
from tests.support.commands import QUIET, Command

OWN = ("model=toy", "training=any")


@pytest.mark.parametrize(
    ("words", "batch", "length"),
    [
        (["model.max_seq_len=131072", "cluster=h100_8x8"], 512, 8192),
        (["model.max_seq_len=131072", "cluster=h100_1x8"], 64, 8192),
        (["model.max_seq_len=131072", "cluster=h100_128x8"], 512, 8192),
        (["model.max_seq_len=2048", "cluster=h100_8x8"], 2048, 2048),
        (["model.max_seq_len=3000", "cluster=h100_8x8"], 1024, 3000),
        (["model.max_seq_len=131072", "cluster=h100_8x8", "seq=131072"], 32, 131072),
        (["model.max_seq_len=131072", "cluster=h100_8x8", "gbs=24"], 24, 8192),
    ],
)
def test_the_assumed_job_has_65536_tokens_a_gpu(words: list[str], batch: int, length: int) -> None:
    """At most 4,194,304 tokens, in a power of two of sequences of at most 8,192 tokens."""
    job = load_config([*OWN, *words]).training
    assert (job.global_batch_size, job.seq_len) == (batch, length)


def test_a_job_of_its_own_is_left_as_it_is() -> None:
    job = load_config(["model=toy", "cluster=toy"]).training
    assert (job.global_batch_size, job.seq_len) == (16, 64)


def test_a_module_says_its_length_its_width_and_its_name() -> None:
    block = [
        "model=module",
        "model.path=mine.blocks:make_block",
        "model.inputs=[[3,1024,64]]",
        "model.num_layers=4",
        "model.vocab_size=1000",
        "cluster=h100_1x8",
    ]
    config = load_config(block)
    assert (config.model.name, config.model.hidden_size) == ("make_block", 64)
    assert config.training.seq_len == 1024
    assert config.training.global_batch_size == 3 * 128  # 524,288 tokens are 171 times three


def test_the_second_line_says_what_was_assumed(command: Command) -> None:
    few = ("space=uniform", "search.num_steps=2", "search.num_restarts=1", "cluster=toy")
    done = command(*OWN, *few, *QUIET, "seq=64", "hydra.run.dir=run")
    assert done.status == 0, done.err
    assert done.out.splitlines()[1] == "assumed: 8,192 × 64 tokens; set gbs="
    written = json.loads(Path(command.folder / "run/plan.json").read_text())
    assert written["training"]["global_batch_size"] == 8192
    assert "assumed: 8,192" in Path(command.folder / "run/report.html").read_text()
