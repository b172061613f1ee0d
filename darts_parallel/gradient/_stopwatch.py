"""The seconds that a search took itself, without those of whoever watches it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Count wall-clock seconds from its making, but for those inside `paused`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return seconds counted so far."""
        return time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the seconds spent inside: pictures and curves are no part of a search."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - since
