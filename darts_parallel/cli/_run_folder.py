"""The folder of a run: writable and its own before work begins, as it was when the run is refused.

What a run has finished (a plan, a checkpoint, a table) is never removed, whatever happens after it.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from darts_parallel.errors import ConfigError

OVERRIDES = "overrides.json"
"""In the folder of every job of a sweep: what the sweep gave it."""
CURVES = "tensorboard"
EVENTS = "events.out.tfevents."
LISTING = "multirun.yaml"
BEGINNINGS = (CURVES, LISTING, OVERRIDES)
"""Files that a run writes before it has found anything."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes."""

    path: Path
    fresh: bool
    """Whether the run made the folder itself."""

    @staticmethod
    def enter(path: Path, began: float) -> "RunFolder":
        """Look at an existing folder; the command began at `began` (wall-clock seconds)."""
        path = path.absolute()
        return RunFolder(path, not os.listdir(path) and path.stat().st_mtime >= began)

    @contextmanager
    def own(self, *, named: bool) -> Iterator["RunFolder"]:
        """Hold the folder for one run at a time, by a lock that ends with the process.

        Two commands of one second are given one folder; the later one takes a further one next to
        it.

        Args:
            named: The user chose the folder: it is refused while another run writes into it.

        Yields:
            The folder that the run has for itself.

        Errors:
            ConfigError: another run writes into the folder that the user named.
        """
        folder = self
        number = 1
        lock = self._lock(named)
        while lock is None:
            number += 1
            path = self.path.with_name(f"{self.path.name}-{number}")
            if named:
                raise ConfigError(
                    f"hydra.run.dir={self.path} is being written by another run; try {path}."
                )
            fresh = not path.exists()
            path.mkdir(exist_ok=True)
            folder = RunFolder(path, fresh)
            lock = folder._lock(named)
        try:
            yield folder
        finally:
            os.close(lock)

    def _lock(self, named: bool) -> int | None:
        """Lock the folder; return None if a run holds it, or left a result where nobody chose it."""
        if not named and self._finished():
            return None
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(handle)
            return None
        except OSError:
            pass  # a file system without locks: the run goes on without one
        return handle

    def _finished(self) -> bool:
        """Return whether a file that is no trace of a beginning is there."""
        for entry in self.path.glob("[!.]*"):
            traces = entry.name in BEGINNINGS or entry.suffix == ".log"
            if not traces and any(path.is_file() for path in (entry, *entry.rglob("*"))):
                return True
        return False

    def require_writable(self) -> None:
        """Raise an OSError for a folder that cannot be written."""
        probe = self.path / ".darts-parallel-probe"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def restore(self) -> None:
        """Remove the beginnings that this run wrote, and the folders that it made, if empty.

        What anybody else has put there stays, and so does every result; next to a result all stays
        as it is.
        """
        if self._finished():
            return
        # TensorBoard writes the number of the process into the name
        own = self.path.glob(f"{CURVES}/{EVENTS}*.{os.getpid()}.*")
        for path in (*own, self.path / OVERRIDES):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            (self.path / CURVES).rmdir()
        if self.fresh:
            remove_empty(self.path)

    def leave(self, overrides: Sequence[str]) -> None:
        """Leave what a sweep gave this job, for the sweep's table, and nothing else."""
        replace(self, fresh=False).restore()
        (self.path / OVERRIDES).write_text(json.dumps(list(overrides)), encoding="utf-8")


def remove_empty(path: Path) -> None:
    """Remove empty folders from here up to the working folder; a sweep's listing may go."""
    here = Path.cwd()
    for folder in (path, *path.parents):
        if folder == path or here in folder.parents:
            with suppress(OSError):
                if os.listdir(folder) == [LISTING]:
                    (folder / LISTING).unlink()
                folder.rmdir()


def forget_sweeps(began: float) -> None:
    """Remove the sweep folders in which no job has begun since `began` (wall-clock seconds)."""
    for listing in Path("multirun").absolute().glob(f"*/*/{LISTING}"):
        if listing.stat().st_mtime >= began:
            remove_empty(listing.parent)
