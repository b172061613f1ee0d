"""The end of a process of the command."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
import sys
from darts_parallel.cli import command

class Kept:
    def __del__(self):
        print("freed")

kept = Kept()

def main():
    atexit.register(print, "theirs")
    print("ours")
    if sys.argv[1:]:
        raise SystemExit(2)

command.main = main
command.run_process()
"""


@pytest.mark.slow
def test_a_process_ends_without_freeing_its_objects_once_others_have_ended() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ours\ntheirs\n", "")
    refused = subprocess.run([*command, "refuse"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "ours\ntheirs\nfreed\n")
