import os
import signal
import subprocess
import sys

import pytest

from darts_parallel.config.interrupts import children_without_interrupts

CHILD = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"


def child() -> str:
    return subprocess.run([sys.executable, "-S", "-c", CHILD], capture_output=True, text=True).stdout


def interrupted_inside() -> None:
    with children_without_interrupts():
        assert child() == "alive\n"
        os.kill(os.getpid(), signal.SIGINT)
        inside.append("still here")


inside: list[str] = []


def test_a_child_does_not_hear_ctrl_c_and_the_parent_hears_it_later() -> None:
    assert child() == ""
    with pytest.raises(KeyboardInterrupt):
        interrupted_inside()
    assert inside == ["still here"]
    assert child() == ""
