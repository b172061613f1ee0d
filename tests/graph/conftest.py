"""Two processes that all tests of plans on gloo share."""

from collections.abc import Iterator

import pytest

from darts_parallel.run.workers import Workers


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    with Workers(2, timeout_s=120.0) as workers:
        yield workers
