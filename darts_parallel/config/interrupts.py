"""How worker processes end: Ctrl-C is their parent's to decide on, and none outlives the parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def children_without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from processes started inside; this process gets it at the end.

    What a child sets itself comes too late: importing torch takes seconds, in which Ctrl-C would
    print the child's traceback. A blocked signal stays blocked in children; here it waits, and
    where another thread of the process hears it, the handler does.
    """
    heard = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    first = threading.current_thread() is threading.main_thread()  # no other one may set handlers
    before = signal.signal(signal.SIGINT, lambda *given: heard.append(given)) if first else None
    try:
        yield
    finally:
        if first:
            signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if heard and callable(before):
            before(*heard[0])


def begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end this process when the one that asked for it is gone.

    A worker that waits for its next job, or in a collective, would not notice: it holds both ends
    of its own pipe. The one that asked is not the parent that the system knows, which is the fork
    server, where there is one, and may be gone already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(
        target=_end_after, args=(multiprocessing.parent_process(),), daemon=True
    ).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
