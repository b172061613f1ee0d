"""Ctrl-C reaches every process of a terminal's job: the parent decides what it means."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_without_interrupts() -> Iterator[None]:
    """Processes started inside do not hear Ctrl-C, from their first import on; this one hears it at the end.

    What a child sets itself comes too late: importing torch takes seconds, in which Ctrl-C would print the
    child's traceback. A blocked signal stays blocked in children; here it waits, unless another
    thread of the process hears it.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
