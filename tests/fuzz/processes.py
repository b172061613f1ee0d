"""Run commands in processes of their own: killed, interrupted, or without room."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.fuzz.case import FuzzCase, FuzzOutcome

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (
    "-m",
    "darts_parallel",
    "model=toy",
    "cluster=toy",
    "training=toy",
    "search=gradient",
    "search.num_steps=40",
    "search.num_restarts=4",
)
RUN = ("-m", "darts_parallel.run", "plan=whole/plan.json", "steps=10000")
COMMANDS = (COMMAND, RUN, ("-m", "experiments.compare", "problems=toy"))
"""Commands that get a signal at random moments, the imports among them."""
PATIENCE_S = 120.0
OWN = re.compile(
    r"Exception ignored in: <function Weak[^\n]*>\n(?:Traceback[^\n]*\n)?(?: [^\n]*\n)*KeyboardInterrupt:? *"
)
"""Words of Python itself about a Ctrl-C inside its weak references, whatever the program does."""
LATE = "tensorboard/events.out.tfevents.9.other.1.0"
OTHERS = (
    "notes.txt",
    "rows/1.csv",
    "tensorboard/events.out.tfevents.1.other.1.0",
    ".hidden",
    "a.log",
)
"""Files of other people where a run is refused, interrupted or killed; `LATE` comes meanwhile."""
REFUSED = (
    "search.num_steps=-1",
    "cluster.devices.toy.memory_GiB=0.0101",
    "space.tp=3",
    "model.num_heads=7",
    "export=nanotron",
    "plan=notes.txt",
    "cluster.nodes.0.gpus=x",
)


def cases(count: int, seed: int) -> Iterator[FuzzCase]:
    """Yield limited environments, and SIGKILLs and as many Ctrl-Cs at random moments of a run."""
    rng = random.Random(seed)
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        for place, limit, status in (("whole", -1, 0), ("small", 2048, 2), ("/proc/run", -1, 2)):
            arguments = (*COMMAND, f"hydra.run.dir={place}")
            yield "limited environments", partial(judge, folder, arguments, (status,), limit=limit)
            seconds = seconds or time.monotonic() - began
        for number in range(count):
            for kind, sent in (("SIGKILL", signal.SIGKILL), ("Ctrl-C", signal.SIGINT)):
                # a shell says 130 of Python's death by SIGINT, too
                good = (0, 2, 130, -signal.SIGINT, -signal.SIGKILL)
                given = (folder, COMMANDS[number % len(COMMANDS)], good)
                yield kind, partial(judge, *given, sent, rng.uniform(0.05, 1.0) * seconds)
                where = rng.choice([".", "deep/er"])
                shared = (
                    *COMMAND,
                    f"hydra.run.dir={where}",
                    *rng.sample(REFUSED, rng.randint(0, 1)),
                )
                moment = rng.uniform(0.05, 1.0) * seconds
                yield f"{kind} in shared folders", partial(judge_shared, shared, good, sent, moment)
            refused = (
                *COMMAND,
                f"hydra.run.dir={rng.choice(['.', 'deep/er'])}",
                rng.choice(REFUSED),
            )
            yield (
                "refusals in shared folders",
                partial(judge_shared, refused, (2,), 0, 0.5 * seconds),
            )


def judge_shared(
    arguments: Sequence[str], good: Sequence[int], sent: int, moment: float
) -> FuzzOutcome:
    """Judge a command in a folder with other people's files, all of which must survive it as they were."""
    with tempfile.TemporaryDirectory() as folder:
        for name in OTHERS:
            (path := Path(folder, name)).parent.mkdir(exist_ok=True)
            path.write_text(name)
        found = judge(folder, arguments, good, sent, moment, late=LATE)
        paths = {name: Path(folder, name) for name in (*OTHERS, LATE)}
        lost = [
            name for name, path in paths.items() if not path.is_file() or path.read_text() != name
        ]
    return found._replace(outcome=f"lost {lost}") if lost else found


def judge(
    folder: str,
    arguments: Sequence[str],
    good: Sequence[int],
    sent: int = 0,
    moment: float = 0.0,
    limit: int = -1,
    late: str = "",
) -> FuzzOutcome:
    """Run a command: one of the `good` statuses, at most a sentence, whole plans, no process left.

    Args:
        sent: Signal that the command gets; 0: none.
        moment: Seconds from the start to the signal.
        limit: Bytes that a file may have; -1: any.
        late: File that somebody else writes at that moment; empty: none.
    """
    subject = f"signal {sent} after {moment:.2f} s of {' '.join(arguments)}"
    files = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    with tempfile.TemporaryFile("w+") as error:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=error,
            start_new_session=True,
            preexec_fn=files,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        if late:
            Path(folder, late).write_text(late)
        process.send_signal(sent)  # 0, or one to a process that has ended, does nothing
        try:
            status = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return FuzzOutcome(subject, f"no end within {PATIENCE_S:.0f} s")
        error.seek(0)
        said = OWN.sub("", error.read()).strip()
    told = "\n" in said and status != -signal.SIGKILL  # then Python's resource tracker warns
    if status not in good or "Traceback" in said or told:
        return FuzzOutcome(subject, f"exit status {status}: {said[-300:]}")
    try:
        whole = all(
            "layers" in json.loads(path.read_text()) for path in Path(folder).rglob("plan.json")
        )
    except ValueError:
        whole = False
    deadline = time.monotonic() + 15.0
    while (left := session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return FuzzOutcome(
        subject, "processes live on" if left else "sound" if whole else "plan.json is broken"
    )


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
