"""Whether this machine is the one that a plan was made for."""

import os
from dataclasses import dataclass

import torch
from torch.torch_version import TorchVersion

from darts_parallel.errors import UnsupportedError
from darts_parallel.plan import Plan
from darts_parallel.problem import Problem

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


def device_for(problem: Problem, plan: Plan, asked: str, machine: LocalMachine) -> str:
    """Return `cpu` or `cuda` for a plan on this machine.

    Args:
        problem: In float32.
        plan: To run.
        asked: `auto` takes the kind that the plan was made for; another value overrules the plan.
        machine: Where it shall run.

    Errors:
        UnsupportedError: the plan is for other hardware, or its state does not fit.
    """
    names = sorted({group.device for group in problem.config.cluster.nodes})
    made_for_cpu = all(float(group.device.peak_flops) < GPU_FLOPS for group in problem.cluster.groups)
    kind = asked if asked != "auto" else (CPU if made_for_cpu else "cuda")
    if kind == "cuda" and not machine.gpus:
        raise UnsupportedError(
            f"the plan is for {problem.cluster.num_devices} x {', '.join(names)}, and this machine has no "
            "GPU; try device=cpu, which computes the same on the CPU."
        )
    if kind == "cuda" and asked == "auto":
        # a device of the configuration (`a100_80`) may be any GPU whose name holds its family
        gpus = " ".join(machine.gpus).upper()
        other = [name for name in names if name.split("_")[0].upper() not in gpus]
        if other:
            raise UnsupportedError(
                f"the plan is for {', '.join(other)}, and this machine has {machine.gpus[0]}; try "
                "device=cuda, which runs it all the same."
            )
    if kind == CPU:
        _require_memory(problem, plan, machine)
    return kind


def _require_memory(problem: Problem, plan: Plan, machine: LocalMachine) -> None:
    from darts_parallel.run._verify import predicted_bytes

    size = problem.cluster.num_devices // plan.pp
    needed = sum(sum(predicted_bytes(problem, plan, stage)) * size for stage in range(plan.pp))
    if needed > machine.free_bytes:
        raise UnsupportedError(
            f"the state of model={problem.model.config.name} needs {needed / 2**30:.1f} GiB in all "
            f"processes, and this machine has {machine.free_bytes / 2**30:.1f} GiB free; try a smaller model."
        )


NEEDED_TORCH = "2.13"
"""Oldest release that plans have run with; DTensor and fully_shard still change from one to the next."""


def require_torch(installed: str | None = None) -> None:
    """Refuse a torch too old to run plans.

    Args:
        installed: Its version; None: that of this process.

    Errors:
        UnsupportedError: it is older than `NEEDED_TORCH`.
    """
    installed = torch.__version__ if installed is None else installed
    if TorchVersion(installed) < f"{NEEDED_TORCH}.0a0":
        raise UnsupportedError(
            f"torch {installed} is installed, and to run a plan takes torch {NEEDED_TORCH} or newer; try "
            f'pip install "torch>={NEEDED_TORCH}".'
        )
