"""The folder of a run: writable before work begins, and as it was when the run is refused."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from darts_parallel.errors import ConfigError


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
        """Look at the folder before anything is written.

        Args:
            path: The folder; exists.
            began: Wall-clock seconds at which the command began.
        """
        path = path.absolute()
        before = frozenset(_contents(path))
        return RunFolder(path, before, not before and path.stat().st_mtime >= began)

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written.

        Errors:
            ConfigError: names the folder.
        """
        probe = self.path / ".darts-parallel-probe"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"output: {self.path} cannot be written ({error.strerror}); nearest legal: a folder that can "
                "be written, e.g. hydra.run.dir=outputs/run."
            ) from None

    def restore(self) -> None:
        """Remove what the run has added, and the folders that it made."""
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
