"""Processes that torchrun has started: what their environment must say, and the engine of a plan on each."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from darts_parallel.errors import DartsParallelError, UnsupportedError
from darts_parallel.plan import read_own_problem, read_plan, refuse_unexecutable
from darts_parallel.run.hardware import require_torch

if TYPE_CHECKING:
    from darts_parallel.run.engine import Engine

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for every process."""
HEARD_S = 3.0
"""torchrun stops all processes when one ends: the others wait until the first has said why."""


@contextmanager
def launched(path: Path, seed: int = 0, timeout_s: float = 600.0) -> Iterator["Engine"]:
    """Join the processes of torchrun, and build this rank's part of a plan in its own precision.

    Args:
        path: A plan file with its configuration.
        seed: Of the weights.
        timeout_s: Longest wait for another process, seconds.

    Errors:
        DartsParallelError: the file is broken, the plan cannot run, or the processes are not its own.
    """
    with refused_by_the_first():
        require_torch()
        problem = read_own_problem(str(path))
        plan = read_plan(str(path), problem)
        refuse_unexecutable(plan, problem)
        require_processes(problem.cluster.num_devices, started=True)
    from darts_parallel.run.engine import Engine

    every_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with joined("cuda" if every_gpu else "cpu", timeout_s) as device:
        yield Engine(problem, plan, seed, device)


@contextmanager
def joined(kind: str, timeout_s: float) -> Iterator[torch.device]:
    """Join the group of torchrun's processes, each on its device; errors as `process_group`.

    Args:
        kind: `cpu` or `cuda`.
        timeout_s: Longest wait for another process, seconds.
    """
    from darts_parallel.run.workers import choose_device, process_group

    device = choose_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    with process_group(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s):
        yield device


@contextmanager
def refused_by_the_first() -> Iterator[None]:
    """Let the first rank alone say what all of them refuse; the others end once it has."""
    try:
        yield
    except DartsParallelError:
        if os.environ.get("RANK", "0") == "0":
            raise
        time.sleep(HEARD_S)
        raise SystemExit(2) from None


def require_processes(count: int, *, started: bool = False) -> None:
    """Refuse an environment with some of torchrun's variables only, or of another number of processes.

    Args:
        count: Devices of the plan.
        started: torchrun must have set the variables; else none of them is fine, too.

    Errors:
        UnsupportedError: names the variable.
    """
    given = [name for name in TORCHRUN if name in os.environ]
    needed = started or {"WORLD_SIZE", "RANK"} & set(given)
    others = "" if started else f", or none of {', '.join(TORCHRUN)}"
    for name in TORCHRUN if needed else ():
        if name not in given:
            raise UnsupportedError(
                f"{name} must be set{f' where {given[0]} is' if given else ''}, as torchrun does; try "
                f"torchrun --nproc-per-node {count}{others}."
            )
        if name != "MASTER_ADDR" and not (value := os.environ[name]).isdigit():
            raise UnsupportedError(f"{name}={value} must be a whole number, as torchrun sets it; try 0.")
    if needed and int(os.environ["WORLD_SIZE"]) != count:
        raise UnsupportedError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} must be the {count} devices of the plan; try torchrun "
            f"--nproc-per-node {count}."
        )
