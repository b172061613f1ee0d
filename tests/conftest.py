from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from darts_parallel.problem.problem import Problem, load_problem
from tests.support.commands import Command
from tests.support.composing import compose_groups_once

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """The command composes equal groups once, as `load_config` does in the product."""
    with pytest.MonkeyPatch.context() as patch:
        compose_groups_once(patch)
        yield


@pytest.fixture(scope="session")
def default_problem() -> Problem:
    """GPT-2 XL on 8 nodes of 4 A10."""
    return load_problem(["model=gpt2_xl", "training=gpt2_xl"])


@pytest.fixture(scope="session")
def toy_problem() -> Problem:
    """A model of 4 blocks on 8 toy devices: small enough for every check."""
    return load_problem(["model=toy", "cluster=toy", "training=toy"])


@pytest.fixture(scope="session")
def llama_problem() -> Problem:
    """Grouped-query attention, gated MLP, tp up to 8: 84 strategies in 7 layouts."""
    return load_problem(["model=llama3_8b", "cluster=h100_1x8", "training=llama3_8b"])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`darts-parallel` in this process, in a folder of its own."""
    return Command(tmp_path, monkeypatch, capsys)
