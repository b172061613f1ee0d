import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from darts_parallel.config.interrupts import children_without_interrupts

CHILD = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"


@pytest.fixture(autouse=True)
def as_on_a_terminal() -> Iterator[None]:
    """Jobs in the background of a shell ignore Ctrl-C, and so would their children."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


def child() -> str:
    return subprocess.run(
        [sys.executable, "-S", "-c", CHILD], capture_output=True, text=True
    ).stdout


def interrupted_inside(interrupt: Callable[[], object], inside: list[str]) -> None:
    with children_without_interrupts():
        inside.append(child())
        interrupt()
        inside.append("still here")


def test_a_child_does_not_hear_ctrl_c_and_the_parent_hears_it_later() -> None:
    assert child() == ""
    with ThreadPoolExecutor(1) as others:
        others.submit(os.getpid).result()  # it is there before
        for hears in (lambda *job: job[0](job[1]), lambda *job: others.submit(*job).result()):
            inside: list[str] = []
            with pytest.raises(KeyboardInterrupt):
                interrupted_inside(partial(hears, signal.raise_signal, signal.SIGINT), inside)
            assert inside == ["alive\n", "still here"]
    assert child() == ""


IDLE = """
import os, sys, time
from darts_parallel.run.workers import Workers
with Workers(2) as workers:
    print(*workers.run(os.getpid), flush=True, file=sys.stderr)
    time.sleep(60)
"""


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_idle_workers_end_when_the_process_that_asked_for_them_is_killed() -> None:
    # Gloo of PyTorch 2.10 prints on standard output
    command = [sys.executable, "-c", IDLE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as asked:
        workers = {int(pid) for pid in asked.stderr.readline().split()}
        assert len(workers) == 2
        assert asked.pid not in workers
        asked.kill()
    deadline = time.monotonic() + 30.0
    while any(runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
