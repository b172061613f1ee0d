"""The folder of a run: writable and its own before work begins, as it was when the run is refused.

What a run has finished (a plan, a checkpoint, a table) is never removed, whatever happens after it.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from darts_parallel.cli._sweep_table import OVERRIDES
from darts_parallel.errors import ConfigError

CURVES, EVENTS = "tensorboard", "events.out.tfevents."
BEGINNINGS = (CURVES, "multirun.yaml", OVERRIDES)
"""Files that a run writes before it has found anything."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what was there before it.

    `fresh`: the run made the folder itself.
    """

    path: Path
    before: frozenset[Path]
    fresh: bool

    @staticmethod
    def enter(path: Path, began: float) -> "RunFolder":
        """Look at an existing folder before a command writes, which began then (wall-clock seconds)."""
        path = path.absolute()
        before = frozenset(_contents(path))
        return RunFolder(path, before, not before and path.stat().st_mtime >= began)

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
                raise ConfigError(
                    f"hydra.run.dir={self.path} is being written by another run; try {beside}."
                )
            fresh = not beside.exists()
            beside.mkdir(exist_ok=True)
            held = replace(self, path=beside, before=frozenset(_contents(beside)), fresh=fresh)
        try:
            yield held
        finally:
            os.close(lock)

    def _locked(self, named: bool) -> int | None:
        """Lock the folder; return None where a run holds it, or left a result in one that nobody chose."""
        if not named and self._finished():
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

    def _finished(self) -> bool:
        """Return whether a file that is no trace of a beginning is there."""
        return any(
            path.is_file()
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
        """Remove the beginnings that the run has added, by name, and the folders that it made, if empty.

        What anybody else has put there stays, and so does every result; next to those all stays as it is.
        """
        added, mine = (
            _contents(self.path) - self.before,
            f".{os.getpid()}.",
        )  # TensorBoard names its writer
        if any(path.name not in BEGINNINGS for path in added if path.parent == self.path):
            return
        for path in sorted(added, reverse=True):
            if path.parent.name == CURVES and path.name.startswith(EVENTS) and mine in path.name:
                path.unlink(missing_ok=True)
            elif path.name == CURVES and path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.name in BEGINNINGS and path.is_file():
                path.unlink()
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
