"""The command in a process of its own: killed, without room, without a folder, without a reader."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

COMMAND = (sys.executable, "-m", "darts_parallel", "model=toy", "cluster=toy", "training=toy",
           "search=gradient", "search.num_steps=40", "search.num_restarts=4")  # fmt: skip
LONGEST = 120
"""Seconds after which a command counts as hanging."""


@dataclass(frozen=True)
class Ending:
    """How a command ended under one difficulty."""

    difficulty: str
    outcome: str
    """`sound`, or what is wrong."""

    @property
    def wrong(self) -> bool:
        """Whether something broken was left or said."""
        return self.outcome != "sound"


def killed(count: int, seed: int) -> list[Ending]:
    """SIGKILL at random moments of a run: `plan.json` is whole or not there, and the next run works."""
    rng, endings = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        first = _ran(folder, "hydra.run.dir=whole")
        whole = time.monotonic() - begun
        endings.append(Ending("a first run", "sound" if first.returncode == 0 else first.stderr))
        for number in range(count):
            moment = rng.uniform(0.2, 1.0) * whole
            process = subprocess.Popen(
                [*COMMAND, f"hydra.run.dir=run_{number}"],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            endings.append(
                Ending(f"SIGKILL after {moment / whole:.0%} of a run", _plan(Path(folder, f"run_{number}")))
            )
        again = _ran(folder, "hydra.run.dir=run_0")
        endings.append(
            Ending(
                "a run into the folder of a killed one", "sound" if again.returncode == 0 else again.stderr
            )
        )
    return endings


def cramped() -> list[Ending]:
    """No room for files, no folder, no room for the output, no reader: one sentence, and a plan stays."""
    endings = []
    with tempfile.TemporaryDirectory() as folder:
        small = _ran(folder, "hydra.run.dir=small", limit=2048)
        endings.append(Ending("files of 2 KiB at most", _sentence(small)))
        Path(folder, "file").write_text("")
        for place in ("file/run", "/proc/run"):
            endings.append(
                Ending(f"hydra.run.dir={place}", _sentence(_ran(folder, f"hydra.run.dir={place}")))
            )
        with open("/dev/full", "w") as full:
            done = _ran(folder, "hydra.run.dir=full", stdout=full)
        outcome = _sentence(done)
        endings.append(
            Ending("standard output is full", outcome if outcome != "sound" else _plan(Path(folder, "full")))
        )
        reading, writing = os.pipe()
        os.close(reading)
        done = _ran(folder, "hydra.run.dir=gone", stdout=writing)
        os.close(writing)
        quiet = "sound" if not done.stderr and done.returncode == 141 else f"{done.returncode}: {done.stderr}"
        endings.append(
            Ending("nobody reads the output", quiet if quiet != "sound" else _plan(Path(folder, "gone")))
        )
    return endings


def _ran(
    folder: str, *overrides: str, limit: int | None = None, stdout: int | IO[str] = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    """The command in a folder; with `limit` no file may grow beyond that many bytes."""

    def before() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit or 0, limit or 0))

    return subprocess.run(
        [*COMMAND, *overrides],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LONGEST,
        preexec_fn=before if limit else None,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )


def _sentence(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr:
        return "sound"
    return f"exit status {done.returncode}: {done.stderr[-300:]}"


def _plan(folder: Path) -> str:
    """`sound` where the folder holds a whole plan or none."""
    path = folder / "plan.json"
    try:
        return "sound" if not path.exists() or "layers" in json.loads(path.read_text()) else "no plan"
    except ValueError as error:
        return f"plan.json is broken: {error}"
