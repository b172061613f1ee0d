"""The commands in processes of their own: killed, interrupted, without room, folder, rights or reader."""

import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from experiments.robustness.verdict import Try, Verdict

SETTINGS = ("model=toy", "cluster=toy", "training=toy", "search=gradient", "search.num_steps=40",
            "search.num_restarts=4")  # fmt: skip
COMMAND = ("-m", "darts_parallel", *SETTINGS)
INTERRUPTED = {
    "the command": COMMAND,
    "darts_parallel.run": ("-m", "darts_parallel.run", "plan=whole/plan.json", "steps=10000"),
    "an experiment": ("-m", "experiments.lossy_collectives"),
}
"""What gets a Ctrl-C at random moments, the imports among them."""
LONGEST = 120
"""Seconds after which a command counts as hanging."""
ALONE_S = 15.0
"""Seconds that workers may live on after SIGKILL of their parent."""
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def tries(count: int, seed: int) -> Iterator[Try]:
    """`count` SIGKILLs, as many Ctrl-Cs, and every cramped place."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        yield Try("cramped places", "whole", partial(_whole, folder))
        for number in range(count):
            share = rng.uniform(0.05, 1.0)
            yield Try("SIGKILL", f"{seed}/{number}", partial(_killed, folder, number, share))
        yield Try("SIGKILL", f"{seed}/again", partial(_again, folder))
        for number in range(count):
            share, name = rng.uniform(0.05, 1.0), list(INTERRUPTED)[number % len(INTERRUPTED)]
            yield Try("Ctrl-C", f"{seed}/{number}", partial(_interrupted, folder, name, share))
        for name, place in PLACES.items():
            yield Try("cramped places", name, partial(place, name, folder))


def _whole(folder: str) -> Verdict:
    """A run that nothing troubles; `whole_run` in the folder holds its seconds."""
    begun = time.monotonic()
    done = _ran(folder, "hydra.run.dir=whole")
    Path(folder, "whole_run").write_text(str(time.monotonic() - begun))
    return Verdict("a run that nothing troubles", "sound" if done.returncode == 0 else done.stderr)


def _moment(folder: str, share: float) -> float:
    path = Path(folder, "whole_run")
    if not path.exists():
        _whole(folder)
    return share * float(path.read_text())


def _killed(folder: str, number: int, share: float) -> Verdict:
    """SIGKILL: `plan.json` is whole or not there; of `darts_parallel.run` no worker lives on."""
    moment, runs = _moment(folder, share), number % 2 == 1
    arguments = INTERRUPTED["darts_parallel.run"] if runs else (*COMMAND, f"hydra.run.dir=run_{number}")
    process = _started(folder, arguments)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    outcome = _plan(Path(folder, f"run_{number}"))
    deadline = time.monotonic() + ALONE_S
    while (left := _session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        outcome = f"{len(left)} processes live on"
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return Verdict(f"SIGKILL after {share:.0%} of a run of {arguments[1]}", outcome)


def _session(leader: int) -> list[int]:
    """Processes of the session that a process has led."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def _again(folder: str) -> Verdict:
    done = _ran(folder, "hydra.run.dir=run_0")
    words = "a run into the folder of a killed one"
    return Verdict(words, "sound" if done.returncode == 0 else done.stderr)


def _interrupted(folder: str, name: str, share: float) -> Verdict:
    """Ctrl-C: at most one sentence and never a traceback; a plan is whole or not there."""
    moment = _moment(folder, share)
    with tempfile.TemporaryFile("w+") as said:
        process = _started(folder, (*INTERRUPTED[name],), stderr=said)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LONGEST)
            except subprocess.TimeoutExpired:
                process.kill()
        status = process.wait()
        said.seek(0)
        words = said.read()
    sound = status in (0, 2, 130) and "Traceback" not in words and words.count("\n") <= 1
    outcome = "sound" if sound else f"exit status {status}: {words[-300:]}"
    return Verdict(f"Ctrl-C after {moment:.2f} s of {name}", outcome)


def _refused(run: str, limit: int | None, name: str, folder: str) -> Verdict:
    Path(folder, "file").write_text("")
    return Verdict(name, _sentence(_ran(folder, f"hydra.run.dir={run}", limit=limit)))


def _read_only(name: str, folder: str) -> Verdict:
    inside = Path(folder, "read_only")
    inside.mkdir(exist_ok=True)
    inside.chmod(0o500)
    return Verdict(name, _sentence(_ran(str(inside), rights=False)))


def _full_output(name: str, folder: str) -> Verdict:
    with open("/dev/full", "w") as full:
        outcome = _sentence(_ran(folder, "hydra.run.dir=full", stdout=full))
    return Verdict(name, outcome if outcome != "sound" else _plan(Path(folder, "full")))


def _no_reader(name: str, folder: str) -> Verdict:
    reading, writing = os.pipe()
    os.close(reading)
    done = _ran(folder, "hydra.run.dir=gone", stdout=writing)
    os.close(writing)
    quiet = "sound" if not done.stderr and done.returncode == 141 else f"{done.returncode}: {done.stderr}"
    return Verdict(name, quiet if quiet != "sound" else _plan(Path(folder, "gone")))


PLACES: dict[str, Callable[[str, str], Verdict]] = {
    "files of 2 KiB at most": partial(_refused, "small", 2048),
    "hydra.run.dir below a file": partial(_refused, "file/run", None),
    "hydra.run.dir=/proc/run": partial(_refused, "/proc/run", None),
    "a folder that may only be read": _read_only,
    "standard output is full": _full_output,
    "nobody reads the output": _no_reader,
}


def _started(
    folder: str, arguments: tuple[str, ...], stderr: int | IO[str] = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """A command in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def _ran(
    folder: str, *overrides: str, limit: int | None = None, rights: bool = True,
    stdout: int | IO[str] = subprocess.DEVNULL,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command in a folder.

    Args:
        folder: Where it runs.
        overrides: Its own.
        limit: Bytes beyond which no file may grow.
        rights: Whether root may write where the folder's mode forbids it.
        stdout: Its output.
    """

    def before() -> None:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if not rights and os.geteuid() == 0:
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)

    return subprocess.run(
        [sys.executable, *COMMAND, *overrides],
        cwd=folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LONGEST,
        preexec_fn=before,
        env=_environment(),
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
