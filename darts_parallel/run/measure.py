"""Measured seconds of a training step, its phases, and peak memory."""

import os
import resource
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from darts_parallel.plan import Plan
from darts_parallel.problem import Problem
from darts_parallel.run._loss import global_batch
from darts_parallel.run._verify import StepComparison, verify
from darts_parallel.run.engine import Clock, Engine, Phases
from darts_parallel.run.settings import RunSettings
from darts_parallel.run.workers import choose_device


@dataclass(frozen=True)
class Measurement:
    """Seconds and bytes of several steps of a plan."""

    seconds: tuple[float, ...]
    """Seconds of every step on its slowest rank, in order."""
    losses: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    """Mean seconds of a step's phases by stage."""
    peak_bytes: tuple[float, ...]
    """Largest memory of a rank by stage: of the process on a CPU, allocated on a GPU."""

    @property
    def iteration_time_s(self) -> float:
        """Median over steps."""
        return median(self.seconds)


def measure(engine: Engine, warmup: int, steps: int, seed: int) -> Measurement:
    """Time `steps` training steps after `warmup` others; collective.

    Args:
        engine: A plan on this rank.
        warmup, steps: Numbers of steps.
        seed: Of the data.
    """
    reset_peak(engine.device)
    seconds, losses = [], []
    for step in range(warmup + steps):
        if step == warmup:
            engine.clock.phases = Phases()
        took, loss = timed_step(engine, seed, 2 + step)
        if step >= warmup:
            seconds.append(took)
            losses.append(loss)
    count = steps
    if engine.device.type == "cuda":  # once more, waiting for the device at every phase
        engine.clock.exact, engine.clock.phases = True, Phases()
        timed_step(engine, seed, 2 + warmup + steps)
        engine.clock.exact, count = False, 1
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = {name: value / count for name, value in asdict(engine.clock.phases).items()}
    dist.all_gather_object(everyone, (mine, peak_bytes(engine.device)))
    size = engine.meshes.stage_size
    stages = [everyone[k * size : (k + 1) * size] for k in range(engine.plan.pp)]
    return Measurement(
        seconds=tuple(seconds),
        losses=tuple(losses),
        phases=tuple({name: sum(p[name] for p, _ in ranks) / size for name in mine} for ranks in stages),
        peak_bytes=tuple(max(peak for _, peak in ranks) for ranks in stages),
    )


def timed_step(engine: Engine, seed: int, step: int) -> tuple[float, float]:
    """Return the seconds of one training step on the slowest rank, and its loss; collective.

    Args:
        engine: A plan on this rank.
        seed, step: Of the data.
    """
    batch = global_batch(engine.problem, seed, step)
    dist.barrier()
    clock = Clock(engine.device, exact=True)
    began = clock.now()
    loss = engine.step(batch)
    took = torch.tensor(clock.now() - began, device=engine.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took), loss


def reset_peak(device: torch.device) -> None:
    """Count peak memory from now on, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # the peak then counts from the start of the process
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> float:
    """Return the peak since `reset_peak`, bytes: allocated on a GPU, resident of this process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run; equal on all ranks but for gradients, which rank 0 has compared."""

    verdict: StepComparison | None
    measurement: Measurement | None


def execute(problem: Problem, plan: Plan, settings: RunSettings, device: str) -> RunOutcome:
    """Build the plan on this rank, then verify and measure what the settings ask for; collective.

    Args:
        problem: In float32.
        plan: Checked by `refuse_unexecutable`.
        settings: Of the run.
        device: `cpu` or `cuda`.
    """
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    engine = Engine(problem, plan, settings.seed, place)
    verdict = verify(engine, settings.seed) if settings.verify else None
    measurement = None
    if settings.steps:
        measurement = measure(engine, settings.warmup, settings.steps, settings.seed)
    return RunOutcome(verdict, measurement)
