"""Independent trainings side by side, each in a process of its own with one thread."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from itertools import starmap
from typing import Any, TypeVar

import torch

from darts_parallel.config import begin_worker, children_without_interrupts

Result = TypeVar("Result")


class Jobs(AbstractContextManager["Jobs"]):
    """A pool of processes; with one process everything runs where it is called."""

    def __init__(self, processes: int = 1) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)
            with (
                children_without_interrupts()
            ):  # the processes import while the caller does something else
                for _ in range(processes):
                    self._pool.submit(torch.get_num_threads)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._pool is not None:
            # after Ctrl-C nobody waits for what runs, and what has not begun is dropped
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(
        self, function: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """Yield `function(*a)` for each `a` in order, each as soon as it is there.

        Args:
            function: At the top of a module.
            arguments: Pickled where there are several processes.
        """
        if self._pool is None:
            return starmap(function, arguments)
        futures = [self._pool.submit(function, *values) for values in arguments]
        return (future.result() for future in futures)


def _begin() -> None:
    """Share the cores with the other workers."""
    begin_worker()
    torch.set_num_threads(1)
