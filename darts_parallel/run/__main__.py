"""Run a plan: every process builds its part of the model and trains it on random tokens, in float32.

    torchrun --nproc-per-node N -m darts_parallel.run plan=plan.json verify=true
    python -m darts_parallel.run plan=plan.json      # starts the N processes of one machine itself

verify=true compares loss, gradients and bytes with one process; the exit status is 1 where they differ.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.console import Console

from darts_parallel.config import run_main
from darts_parallel.cost import CostBreakdown, evaluate
from darts_parallel.errors import UnsupportedError
from darts_parallel.run.launch import (
    LocalMachine,
    device_for,
    joined,
    leave,
    refused_by_the_first,
    require_processes,
    require_torch,
)
from darts_parallel.run.settings import RunSettings, load

if TYPE_CHECKING:
    from darts_parallel.run.measure import RunOutcome

TERMINATED = 143
"""Exit status after SIGTERM: 128 and its number."""


def run(options: RunSettings) -> int:
    """Run in this process (as torchrun starts it), or in processes of its own.

    Returns:
        The exit status: 1 where the comparison failed.
    """
    with refused_by_the_first():  # before the imports, which an older torch fails
        require_torch()
        problem, plan = load(options)
        device = device_for(problem, plan, options.device, LocalMachine.here())
        require_processes(problem.cluster.num_devices)
    from darts_parallel.run.measure import execute
    from darts_parallel.run.workers import Workers

    world = problem.cluster.num_devices
    outcome: RunOutcome
    if "WORLD_SIZE" in os.environ:
        with joined(device, options.timeout_s):
            outcome = execute(problem, plan, options, device)
        if os.environ["RANK"] != "0":
            return 0
    else:
        with Workers(world, options.timeout_s, device) as workers:
            outcome = workers.run(execute, problem, plan, options, device)[0]
    cost: CostBreakdown | None = None
    with suppress(UnsupportedError):  # what the cost model cannot price still runs
        cost = evaluate(plan, problem)
    console = Console()
    from darts_parallel.run.measure import render

    described = plan.describe(problem.training.global_batch_size)
    job = f"{problem.model.config.name} on {world} processes ({device})"
    console.print(f"{job}: {described}\n", highlight=False)
    render(outcome, cost, console)
    return 0 if outcome.verdict is None or outcome.verdict.passed else 1


def main() -> int:
    """Run the command; of several processes only the first prints what all of them refuse."""
    # workers are stopped on the way out
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    try:
        return run_main("darts_parallel.run", run)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    leave(main())
