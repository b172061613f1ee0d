import signal
import subprocess
import sys
from collections.abc import Iterator

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
    return subprocess.run([sys.executable, "-S", "-c", CHILD], capture_output=True, text=True).stdout


def interrupted_inside() -> None:
    with children_without_interrupts():
        assert child() == "alive\n"
        signal.raise_signal(signal.SIGINT)  # to this thread: another one, if there is, would not wait
        inside.append("still here")


inside: list[str] = []


def test_a_child_does_not_hear_ctrl_c_and_the_parent_hears_it_later() -> None:
    assert child() == ""
    with pytest.raises(KeyboardInterrupt):
        interrupted_inside()
    assert inside == ["still here"]
    assert child() == ""
