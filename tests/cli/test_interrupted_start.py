"""Ctrl-C while a command still imports: one sentence, and no traceback of half an import."""

import subprocess
import sys

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "darts_parallel.cost":  # the first of the packages that take long
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = [{started!r}]
import darts_parallel
darts_parallel.plan
"""


def test_a_command_ends_in_one_sentence() -> None:
    started = PROGRAM.format(started="/usr/bin/darts-parallel")
    done = subprocess.run([sys.executable, "-c", started], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted before anything began.\n")


def test_a_program_of_ones_own_gets_the_exception() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(started="mine.py")], capture_output=True, text=True
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
