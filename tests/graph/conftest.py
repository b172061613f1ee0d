"""Two processes that all tests of plans on gloo share, and what torch's export looks up once."""

import typing
from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch._export import utils

from darts_parallel.run.workers import Workers


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    with Workers(2, timeout_s=120.0) as workers:
        yield workers


@pytest.fixture(scope="session", autouse=True)
def looked_up_once() -> Iterator[None]:
    """Let every export but the first know torch's operators; no test registers others.

    `typing.Callable` remembers its own subscripts, which torch makes again for every kernel.
    """
    known = cache(utils._materialize_cpp_cia_ops)
    with (
        patch.object(utils, "_materialize_cpp_cia_ops", known),
        patch.object(torch._ops, "Callable", typing.Callable),
    ):
        yield
