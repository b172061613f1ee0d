"""Processes of tests, forked from a server that has imported torch once: to import it takes seconds."""

import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import run as launcher

from darts_parallel.cli import command as cli
from darts_parallel.gradient.descent import search_tables
from darts_parallel.gradient.step_record import SearchResult
from darts_parallel.run.workers import preloaded

PATIENCE_S = 120.0


def run_ranks(count: int, folder: Path, job: Callable[..., object], *arguments: Any) -> list[str]:
    """Run a job in `count` processes that have torchrun's environment; what each printed, by rank.

    Args:
        count: Processes of one node.
        folder: For what they print.
        job: A function of a module that can be imported; it joins the process group itself.
        arguments: Of the job, for every rank alike.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    files = [folder / f"rank-{rank}.txt" for rank in range(count)]
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    world |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes = []
    for rank, file in enumerate(files):
        environment = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = preloaded().Process(
            target=_rank, args=(environment, file, job, arguments), daemon=True
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * count
    return [file.read_text() for file in files]


def _rank(
    environment: dict[str, str], file: Path, job: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    with file.open("w") as out, redirect_stdout(out):
        job(*arguments)


def torchrun(said: Path, arguments: list[str]) -> None:
    """A job: torchrun's own main function; it and the ranks that it starts print into `said`."""
    with said.open("w") as out:
        for descriptor in (1, 2):
            os.dup2(out.fileno(), descriptor)
    os.environ["OMP_NUM_THREADS"] = "1"
    launcher.main(arguments)


def run_program(file: Path, *arguments: str) -> None:
    """A job: a Python file as the main program, without GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.argv = [str(file), *arguments]
    runpy.run_path(str(file), run_name="__main__")


def told_command(says: Connection, folder: Path, arguments: list[str]) -> None:
    """A job: `darts-parallel` in `folder`, which says every step of its gradient search."""

    def telling(
        *given: Any, on_record: Callable[[Any], None], **settings: Any
    ) -> SearchResult | None:
        return search_tables(
            *given, on_record=lambda record: (says.send(record.step), on_record(record)), **settings
        )

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    sys.argv = ["darts-parallel", *arguments]
    with patch("darts_parallel.planner._descent_method.search_tables", telling):
        cli.main()
