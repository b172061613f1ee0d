"""Who follows a job while it runs: progress, records of the search, sentences; by default nobody."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from darts_parallel.gradient.step_record import StepRecord

Update = Callable[[int, str], None]
"""Told how many steps are done, and a few words on the state."""


def _ignore(done: int, text: str) -> None:
    """Nobody looks."""


class Watcher:
    """Looks on and keeps quiet; the command's own one prints and writes curves.

    A watcher never changes a plan: the clock of a search stands still while it is told something.
    """

    def progress(self, title: str, total: int | None = None) -> AbstractContextManager[Update]:
        """A task of `total` steps begins, and ends with the context; None: nobody knows how many."""
        return nullcontext(_ignore)

    def record(self, record: StepRecord) -> None:
        """The state of the search at a step."""

    def say(self, sentence: str) -> None:
        """Something that the user should know at once."""
