"""Run commands in processes of their own: killed, interrupted, or without room."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import FuzzCase, FuzzOutcome

COMMAND = ("-m", "darts_parallel", "model=toy", "cluster=toy", "training=toy", "search=gradient",
           "search.num_steps=40", "search.num_restarts=4")  # fmt: skip
RUN = ("-m", "darts_parallel.run", "plan=whole/plan.json", "steps=10000")
TROUBLED = (COMMAND, RUN, ("-m", "experiments.lossy_collectives"))
"""Commands that get a signal at random moments, the imports among them."""
LONGEST, ALONE = 120.0, 15.0
"""Seconds after which a command counts as hanging, and that workers may live on after their parent."""


def cases(count: int, seed: int) -> Iterator[FuzzCase]:
    """Yield SIGKILLs, as many Ctrl-Cs, and every limited environment."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        whole = partial(judge, folder, (*COMMAND, "hydra.run.dir=whole"), (0,))
        yield "limited environments", whole
        seconds = time.monotonic() - began
        for number in range(count):
            for kind, sent in (("SIGKILL", signal.SIGKILL), ("Ctrl-C", signal.SIGINT)):
                moment, arguments = rng.uniform(0.05, 1.0) * seconds, TROUBLED[number % len(TROUBLED)]
                yield kind, partial(signalled, folder, arguments, sent, moment)
        for limit, place in ((2048, "small"), (None, "file/run"), (None, "/proc/run")):
            Path(folder, "file").write_text("")
            arguments = (*COMMAND, f"hydra.run.dir={place}")
            yield "limited environments", partial(judge, folder, arguments, (2,), limit=limit)
        yield "limited environments", partial(judge, folder, COMMAND, (2,), output="/dev/full")


def start(folder: str, arguments: Sequence[str], error: Any, **given: Any) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, without output unless `given` says so."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "HOME": folder}
    given = {"stdout": subprocess.DEVNULL, "start_new_session": True, "text": True} | given
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stderr=error, **given)


def finish(process: "subprocess.Popen[str]", error: Any, good: Sequence[int], sent: int = 0) -> str:
    """Wait for the end: at most one sentence, no traceback, one of the `good` statuses."""
    try:
        status = process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    error.seek(0)
    words = error.read().strip()
    if (status in good and "Traceback" not in words and words.count("\n") == 0) or status == -sent < 0:
        return "sound"
    return f"exit status {status}: {words[-300:]}"


def judge(
    folder: str, arguments: Sequence[str], good: Sequence[int], limit: int | None = None, output: str = ""
) -> FuzzOutcome:
    """Run a command to its end, where no file may grow beyond `limit` bytes."""

    def before() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with tempfile.TemporaryFile("w+") as error, open(output or os.devnull, "w") as full:
        process = start(folder, arguments, error, stdout=full, preexec_fn=before)
        return FuzzOutcome(" ".join([*arguments, output]), finish(process, error, good))


def signalled(folder: str, arguments: Sequence[str], sent: int, moment: float) -> FuzzOutcome:
    """Send a signal at a moment: every plan is whole or not there, and no worker lives on."""
    with tempfile.TemporaryFile("w+") as error:
        process = start(folder, arguments, error)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
        outcome = finish(process, error, (0, 2, 130), sent if sent == signal.SIGKILL else 0)
    for path in Path(folder).rglob("plan.json"):
        try:
            outcome = outcome if "layers" in json.loads(path.read_text()) else "a plan without layers"
        except ValueError:
            outcome = "plan.json is broken"
    deadline = time.monotonic() + ALONE
    while (left := session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    subject = f"signal {sent} after {moment:.2f} s of {' '.join(arguments)}"
    return FuzzOutcome(subject, f"{len(left)} processes live on" if left else outcome)


def session(leader: int) -> list[int]:
    """Return the processes of the session that a process has led."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parts[3]) == leader and parts[0] != "Z":
            found.append(int(entry.parent.name))
    return found
