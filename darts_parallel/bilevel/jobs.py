"""Independent trainings side by side, each in a process of its own with one thread."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import torch

from darts_parallel.config.interrupts import children_without_interrupts, end_with_parent

Result = TypeVar("Result")


class Jobs:
    """A pool that is started with the first jobs; with one process everything runs where it is called.

    Args:
        processes: At most this many trainings at once.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            # what has not begun is dropped; after Ctrl-C nobody waits for what runs
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def start(self) -> None:
        """Let the processes import what they need while the caller does something else."""
        if self.processes > 1 and self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(self.processes, mp_context=context, initializer=_quiet)
            with children_without_interrupts():
                for _ in range(self.processes):
                    self._pool.submit(torch.get_num_threads)  # anything

    def map(
        self,
        function: Callable[..., Result],
        arguments: Sequence[tuple[Any, ...]],
        on_done: Callable[[int, Result], None] = lambda done, result: None,
    ) -> list[Result]:
        """Results of `function(*a)` for each `a` in order.

        Args:
            function: Of a module.
            arguments: Pickled where there are several processes.
            on_done: Called with the number of results there are and the last of them.
        """
        self.start()
        results: list[Result] = []
        if self._pool is None:
            for own in arguments:
                results.append(function(*own))
                on_done(len(results), results[-1])
            return results
        futures = [self._pool.submit(function, *own) for own in arguments]
        for future in futures:
            results.append(future.result())
            on_done(len(results), results[-1])
        return results


def _quiet() -> None:
    """A worker leaves Ctrl-C to its parent, ends with it, and shares the cores with the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)
