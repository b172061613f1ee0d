"""What every process does with a plan, once the process group stands."""

import os
from dataclasses import dataclass

import torch._dynamo  # noqa: F401  fully_shard needs it: imported once, before workers are forked

from darts_parallel.problem import Problem
from darts_parallel.run.engine import Engine
from darts_parallel.run.group import choose_device
from darts_parallel.run.measure import Measurement, measure
from darts_parallel.run.settings import RunSettings
from darts_parallel.run.verify import Verdict, verify
from darts_parallel.strategy import Plan


@dataclass(frozen=True)
class Outcome:
    """What a run has shown; equal on all ranks but for gradients, which rank 0 has compared."""

    verdict: Verdict | None
    measurement: Measurement | None


def execute(problem: Problem, plan: Plan, settings: RunSettings, device: str) -> Outcome:
    """Build the plan on this rank, then verify and measure what the settings ask for; collective.

    Args:
        problem: In float32.
        plan: Checked by `refuse_unexecutable`.
        settings: Of the run.
        device: `cpu` or `cuda`.
    """
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    engine = Engine(problem, plan, settings.schedule, settings.seed, place)
    verdict = verify(engine, settings.seed) if settings.verify else None
    measurement = None
    if settings.steps:
        measurement = measure(engine, settings.warmup, settings.steps, settings.seed)
    return Outcome(verdict, measurement)
