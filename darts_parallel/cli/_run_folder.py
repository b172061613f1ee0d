"""The folder of a run: writable and its own before work begins, as it was when the run is refused.

What a run has finished (a plan, a checkpoint, a table) is never removed, whatever happens after it.
"""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from darts_parallel.errors import ConfigError

BEGINNINGS = ("tensorboard", "multirun.yaml")
"""Files that a run writes before it has found anything."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what was there before it.

    `fresh`: the run made the folder itself.
    """

    path: Path
    before: frozenset[Path]
    fresh: bool
    began: float = field(default_factory=time.time)
    """Wall-clock seconds at which the command began."""

    @staticmethod
    def enter(path: Path, began: float) -> "RunFolder":
        """Look at an existing folder before a command writes, which began then (wall-clock seconds)."""
        path = path.absolute()
        before = frozenset(_contents(path))
        return RunFolder(path, before, not before and path.stat().st_mtime >= began, began)

    @contextmanager
    def own(self, *, named: bool) -> Iterator["RunFolder"]:
        """Hold the folder for one run at a time, by a lock that ends with the process.

        Two commands of one second are given one folder; the later one takes a further one next to it.

        Args:
            named: The user chose the folder: it is refused while another run writes into it.

        Yields:
            The folder that the run has for itself.

        Errors:
            ConfigError: another run writes into the folder that the user named.
        """
        held, number = self, 1
        while (lock := held._locked(named)) is None:
            number += 1
            beside = self.path.with_name(f"{self.path.name}-{number}")
            if named:
                raise ConfigError(f"hydra.run.dir={self.path} is being written by another run; try {beside}.")
            fresh = not beside.exists()
            beside.mkdir(exist_ok=True)
            held = replace(self, path=beside, before=frozenset(_contents(beside)), fresh=fresh)
        try:
            yield held
        finally:
            os.close(lock)

    def _locked(self, named: bool) -> int | None:
        """A lock on the folder; None where a run holds it, or left a result in one that nobody chose."""
        if not named and self._finished(since=0.0):
            return None
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                return None
            # a file system without locks: the run goes on as it did before
        return handle

    def _finished(self, since: float) -> bool:
        """Whether a file that is no trace of a beginning was written since then (wall-clock seconds)."""
        return any(
            path.is_file() and path.stat().st_mtime >= since
            for entry in self.path.glob("[!.]*")
            if entry.name not in BEGINNINGS and entry.suffix != ".log"
            for path in (entry, *entry.rglob("*"))
        )

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written."""
        probe = self.path / ".darts-parallel-probe"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"output: {self.path} cannot be written ({error.strerror}); try a folder that can "
                "be written, e.g. hydra.run.dir=outputs/run."
            ) from None

    def restore(self) -> None:
        """Remove what the run has added, and the folders that it made, unless a result is among it."""
        if self._finished(self.began):
            return
        for path in sorted(_contents(self.path) - self.before, reverse=True):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not self.fresh:
            return
        here = Path.cwd()
        for folder in (self.path, *self.path.parents):
            sweep = folder / "multirun.yaml"
            if folder != self.path and here not in folder.parents:
                return
            try:
                if [entry.name for entry in folder.iterdir()] == [sweep.name]:
                    sweep.unlink()
                folder.rmdir()
            except OSError:
                return


def _contents(path: Path) -> set[Path]:
    return {*path.glob("*"), *(path / "tensorboard").glob("*")}


def forget_sweeps(began: float) -> None:
    """Remove the sweep folders in which no job has begun since `began` (wall-clock seconds)."""
    for listing in Path("multirun").absolute().glob("*/*/multirun.yaml"):
        folder = listing.parent
        if listing.stat().st_mtime >= began and len(list(folder.iterdir())) == 1:
            RunFolder(folder, frozenset(), fresh=True).restore()
