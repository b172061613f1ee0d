"""Runs the command in this process, in a folder of its own."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import pytest

from darts_parallel.cli import _trainers
from darts_parallel.cli.command import main
from darts_parallel.config import NEWEST

TOY = (
    "model=toy",
    "cluster=toy",
    "training=toy",
    "search=gradient",
    "search.num_steps=10",
    "search.num_restarts=2",
    "space.num_micro_batches=[2,4]",
    "space.zero_stage=[0,1]",
)
QUIET = ("output.tensorboard=false", "verification.enabled=false")


def alias_bomb() -> str:
    """Return a short YAML text whose aliases stand for 9^29 values."""
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    return "\n".join(["a0: &a0 [x]", *lines])


@dataclass(frozen=True)
class CommandOutcome:
    """Hold what one command left behind."""

    status: int
    out: str
    err: str
    files: tuple[str, ...]


def one_trainer(arguments: Iterable[str]) -> tuple[str, ...]:
    """The trainer that is asked about a job, another one for other arguments."""
    number = crc32(" ".join(arguments).encode()) % len(NEWEST)
    return NEWEST[number : number + 1]


@dataclass(frozen=True)
class Command:
    """`darts-parallel` with `folder` as the working folder.

    A command with `QUIET` asks one trainer about the job, another one for other arguments: all seven take a
    third of a small command's time. Commands without it ask all of them.
    """

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> CommandOutcome:
        self.monkeypatch.setattr(sys, "argv", ["darts-parallel", *arguments])
        self.monkeypatch.chdir(self.folder)
        self.monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        asked = one_trainer(arguments) if set(QUIET) <= set(arguments) else NEWEST
        self.monkeypatch.setattr(_trainers, "NEWEST", asked)
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        captured = self.capsys.readouterr()
        files = tuple(sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*")))
        return CommandOutcome(status, captured.out, captured.err, files)

    def plan_file(self) -> Path:
        """The one plan.json of the folder."""
        (path,) = self.folder.rglob("plan.json")
        return path
