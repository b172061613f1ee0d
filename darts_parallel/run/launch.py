"""Where a plan runs: the machine it was made for, the environment of torchrun's processes, their engines."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.torch_version import TorchVersion

from darts_parallel.errors import DartsParallelError, UnsupportedError
from darts_parallel.plans import Plan, read_own_problem, read_plan, refuse_unexecutable
from darts_parallel.problem import Problem

if TYPE_CHECKING:
    from darts_parallel.run.engine import Engine

CPU = "cpu"
GPU_FLOPS = 8e12
"""A device of at least this float32 peak is a GPU: the slowest of conf/device has 15.7e12."""


@dataclass(frozen=True)
class LocalMachine:
    """Facts on this machine that a check needs."""

    gpus: tuple[str, ...]
    """Names of its GPUs."""
    free_bytes: float
    """Memory for processes."""

    @staticmethod
    def here() -> "LocalMachine":
        """Look at this machine."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = tuple(torch.cuda.get_device_name(i) for i in range(count))
        return LocalMachine(names, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def device_for(
    problem: Problem,
    plan: Plan,
    asked: str,
    machine: LocalMachine,
) -> str:
    """Return `cpu` or `cuda` for a plan on this machine.

    Args:
        asked: `auto` takes the kind that the plan was made for; another value overrules the plan.

    Errors:
        UnsupportedError: the plan is for other hardware, or its state does not fit.
    """
    kind = asked
    if asked == "auto":
        fastest = max(float(group.device.peak_flops) for group in problem.cluster.groups)
        kind = CPU if fastest < GPU_FLOPS else "cuda"
    if kind == CPU:
        _require_memory(problem, plan, machine)
        return kind
    if not machine.gpus:
        names = ", ".join(problem.config.cluster.used_devices)
        raise UnsupportedError(
            f"the plan is for {problem.cluster.num_devices} x {names}, and this machine has no "
            "GPU; try device=cpu, which computes the same on the CPU."
        )
    # a device of the configuration (`a100_80`) may be any GPU whose name holds its family
    gpus = " ".join(machine.gpus).upper()
    used = problem.config.cluster.used_devices
    other = [name for name in used if name.split("_")[0].upper() not in gpus]
    if asked == "auto" and other:
        raise UnsupportedError(
            f"the plan is for {', '.join(other)}, and this machine has {machine.gpus[0]}; try "
            "device=cuda, which runs it all the same."
        )
    return kind


def _require_memory(problem: Problem, plan: Plan, machine: LocalMachine) -> None:
    from darts_parallel.run._verify import predicted_bytes

    size = problem.cluster.num_devices // plan.pp
    needed = 0.0
    for stage in range(plan.pp):
        needed += sum(predicted_bytes(problem, plan, stage)) * size
    if needed > machine.free_bytes:
        raise UnsupportedError(
            f"the state of model={problem.model.config.name} needs {needed / 2**30:.1f} GiB in all "
            f"processes, and this machine has {machine.free_bytes / 2**30:.1f} GiB free; try a smaller model."
        )


NEEDED_TORCH = "2.13"
"""Oldest release that plans have run with; DTensor and fully_shard still change from one to the next."""


def require_torch() -> None:
    """Refuse a torch too old to run plans.

    Errors:
        UnsupportedError: it is older than `NEEDED_TORCH`.
    """
    installed = torch.__version__
    if TorchVersion(installed) < f"{NEEDED_TORCH}.0a0":
        raise UnsupportedError(
            f"torch {installed} is installed, and to run a plan takes torch {NEEDED_TORCH} or newer; try "
            f'pip install "torch>={NEEDED_TORCH}".'
        )


TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for every process."""
HEARD_S = 3.0
"""torchrun stops all processes when one ends: the others wait until the first has said why."""


@contextmanager
def launched(path: Path, seed: int = 0, timeout_s: float = 600.0) -> Iterator["Engine"]:
    """Join the processes of torchrun, and build this rank's part of a plan in its own precision.

    Args:
        timeout_s: Longest wait for another process, seconds.

    Errors:
        DartsParallelError: the file is broken, the plan cannot run, or the processes are not its own.
    """
    with refused_by_the_first():
        require_torch()
        problem = read_own_problem(str(path))
        plan = read_plan(str(path), problem.model)
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
        timeout_s: Longest wait for another process, seconds.
    """
    from darts_parallel.run.workers import choose_device, process_group

    device = choose_device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    with process_group(device, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s):
        yield device


def leave(status: int) -> NoReturn:
    """End this process; one of torchrun's does not take the interpreter down first.

    A thread of gloo may still be freeing tensors of its last message; without an interpreter it aborts.
    """
    if "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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
        started: torchrun must have set the variables; else none of them is fine, too.

    Errors:
        UnsupportedError: names the variable.
    """
    given = [name for name in TORCHRUN if name in os.environ]
    if not started and not {"WORLD_SIZE", "RANK"} & set(given):
        return
    others = "" if started else f", or none of {', '.join(TORCHRUN)}"
    for name in TORCHRUN:
        _require_variable(name, given, f"torchrun --nproc-per-node {count}{others}")
    world = os.environ["WORLD_SIZE"]
    if int(world) != count:
        raise UnsupportedError(
            f"WORLD_SIZE={world} must be the {count} devices of the plan; try torchrun "
            f"--nproc-per-node {count}."
        )


def _require_variable(name: str, given: list[str], command: str) -> None:
    """Refuse a variable of torchrun that is missing or no number."""
    if name not in given:
        where = f" where {given[0]} is" if given else ""
        raise UnsupportedError(f"{name} must be set{where}, as torchrun does; try {command}.")
    value = os.environ[name]
    if name != "MASTER_ADDR" and not value.isdigit():
        raise UnsupportedError(
            f"{name}={value} must be a whole number, as torchrun sets it; try 0."
        )
