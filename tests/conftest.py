"""Fixtures of all tests, and the order in which they run.

With xdist the process that hands out the tests reads this file, too, and collects nothing: what is slow to
import is imported inside of fixtures.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from darts_parallel.problem.problem import Problem
    from tests.support.commands import Command

FIRST = (
    "tests/bilevel/",
    "tests/cli/",
    "tests/config/test_huggingface.py",
    "tests/experiments/",
    "tests/export/test_torch.py",
    "tests/fuzz/",
    "tests/graph/",
    "tests/machine/",
    "tests/run/",
)
"""Tests that start processes, draw, or need transformers: in one of two xdist workers; the other imports
nothing for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put those of `FIRST` first: idle workers steal from the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def pytest_collection_finish() -> None:
    """Look for garbage rarely, and never among what imports and collection made: a tenth of all seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Let torch compute in one thread, as the command does."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """Parse equal YAML once: Hydra reads the same ten files for every configuration."""
    from tests.support.parsed import parse_once

    with parse_once():
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_with_transformers() -> Iterator[None]:
    """Let the server that forks processes import transformers once; eight of its processes would."""
    from multiprocessing.context import ForkServerContext

    usual = ForkServerContext.set_forkserver_preload

    def preload(self: ForkServerContext, names: list[str]) -> None:
        usual(self, [*names, "transformers.modeling_utils"])

    with patch.object(ForkServerContext, "set_forkserver_preload", preload):
        yield


@pytest.fixture(scope="session")
def default_problem() -> Problem:
    """GPT-2 XL on 8 nodes of 4 A10."""
    from darts_parallel.problem.problem import load_problem

    return load_problem(["model=gpt2_xl", "training=gpt2_xl"])


@pytest.fixture(scope="session")
def toy_problem() -> Problem:
    """A model of 4 blocks on 8 toy devices: small enough for every check."""
    from darts_parallel.problem.problem import load_problem

    return load_problem(["model=toy", "cluster=toy", "training=toy"])


@pytest.fixture(scope="session")
def llama_problem() -> Problem:
    """Grouped-query attention, gated MLP, tp up to 8: 84 strategies in 7 layouts."""
    from darts_parallel.problem.problem import load_problem

    return load_problem(["model=llama3_8b", "cluster=h100_1x8", "training=llama3_8b"])


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`darts-parallel` in this process, in a folder of its own."""
    from tests.support.commands import Command

    return Command(tmp_path, monkeypatch, capsys)
