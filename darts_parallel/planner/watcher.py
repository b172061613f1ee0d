"""Who follows a job while it runs: progress, records of the search, sentences; by default nobody."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from darts_parallel.gradient import StepRecord

Update = Callable[[int, str], None]
"""Told how many steps are done, and a few words on the state."""


def _ignore(done: int, text: str) -> None:
    """Ignore it."""


class Watcher:
    """Follow a job silently; the command's own watcher prints and writes curves.

    A watcher never changes a plan: the clock of a search stands still while it is told something.
    """

    def progress(self, title: str, total: int | None = None) -> AbstractContextManager[Update]:
        """Begin a task of `total` steps (None: unknown), which ends with the context."""
        return nullcontext(_ignore)

    def record(self, record: StepRecord) -> None:
        """Receive the state of the search at a step."""

    def say(self, sentence: str) -> None:
        """Tell the user something at once."""
