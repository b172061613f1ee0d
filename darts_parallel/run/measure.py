"""Measured seconds of a training step, its phases and peak memory, and the output of a run."""

import os
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console, JustifyMethod
from rich.table import Table

from darts_parallel.config import LOSSLESS
from darts_parallel.cost import CostBreakdown
from darts_parallel.errors import Amounts
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.run._verify import TOLERANCE, Bytes, StepComparison, verify
from darts_parallel.run.engine import PHASES, Clock, Engine, global_batch, no_seconds, of_all_ranks
from darts_parallel.run.settings import RunSettings
from darts_parallel.run.workers import choose_device


@dataclass(frozen=True)
class Measurement:
    """Seconds and bytes of several steps of a plan."""

    seconds: tuple[float, ...]
    """Seconds of every step on its slowest rank, in order."""
    phases: tuple[Amounts, ...]
    """Mean seconds of a step's phases by stage."""
    peak_bytes: tuple[float, ...]
    """Largest memory of a rank by stage: of the process on a CPU, allocated on a GPU."""

    @property
    def iteration_time_s(self) -> float:
        """Median over steps."""
        return median(self.seconds)


def measure(
    engine: Engine,
    warmup: int,
    steps: int,
    seed: int,
) -> Measurement:
    """Time `steps` training steps after `warmup` others; collective."""
    reset_peak(engine.device)
    seconds = []
    for step in range(warmup + steps):
        if step == warmup:
            engine.clock.phases = no_seconds()
        took, _ = timed_step(engine, seed, 2 + step)
        if step >= warmup:
            seconds.append(took)
    count = steps
    if engine.device.type == "cuda":  # once more, waiting for the device at every phase
        engine.clock.exact = True
        engine.clock.phases = no_seconds()
        timed_step(engine, seed, 2 + warmup + steps)
        engine.clock.exact = False
        count = 1
    phases, peaks = _by_stage(engine, count)
    return Measurement(tuple(seconds), phases, peaks)


def _by_stage(engine: Engine, count: int) -> tuple[tuple[Amounts, ...], tuple[float, ...]]:
    """Return mean seconds of the phases of `count` steps, and peak bytes, by stage; collective."""
    mine = {name: value / count for name, value in engine.clock.phases.items()}
    everyone = of_all_ranks((mine, peak_bytes(engine.device)))
    size = engine.meshes.stage_size
    means = []
    peaks = []
    for stage in range(engine.plan.pp):
        ranks = everyone[stage * size : (stage + 1) * size]
        means.append({name: sum(own[name] for own, _ in ranks) / size for name in mine})
        peaks.append(max(peak for _, peak in ranks))
    return tuple(means), tuple(peaks)


def timed_step(engine: Engine, seed: int, step: int) -> tuple[float, float]:
    """Return the seconds of one training step on the slowest rank, and its loss; collective."""
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


def execute(
    problem: Problem,
    plan: Plan,
    settings: RunSettings,
    device: str,
) -> RunOutcome:
    """Build the plan on this rank, then verify and measure what the settings ask for; collective.

    Collectives at few bits are verified as exact ones: one process does not round.

    Args:
        plan: Checked by `refuse_unexecutable`.
    """
    seed = settings.seed
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    exact = with_exact_collectives(plan)
    engine = Engine(problem, exact if settings.verify else plan, seed, place)
    verdict = verify(engine, seed) if settings.verify else None
    measurement = None
    if settings.steps:
        if engine.plan != plan:
            engine = Engine(problem, plan, seed, place)
        measurement = measure(engine, settings.warmup, settings.steps, seed)
    return RunOutcome(verdict, measurement)


def with_exact_collectives(plan: Plan) -> Plan:
    """Return a plan whose collectives send whole numbers."""
    exact = partial(replace, tp_comm_bits=LOSSLESS, grad_comm_bits=LOSSLESS)
    return replace(plan, layers=tuple(map(exact, plan.layers)))


def render(outcome: RunOutcome, cost: CostBreakdown | None, console: Console) -> None:
    """Print all that was measured.

    Args:
        cost: What the cost model says of the plan in float32; None where it cannot price it.
    """
    if outcome.verdict is not None:
        _render_verdict(outcome.verdict, console)
    measured = outcome.measurement
    if measured is None:
        return
    seconds = measured.iteration_time_s
    steps = measured.seconds
    spread = f"median of {len(steps)}, {min(steps):.4f} to {max(steps):.4f}"
    console.print(f"measured {seconds:.4f} s per iteration ({spread})")
    predicted = "predicted: the cost model cannot price this plan yet"
    if cost is not None:
        ratio = seconds / cost.iteration_time_s
        predicted = f"predicted {cost.iteration_time_s:.4f} s; measured / predicted = {ratio:.2f}"
    console.print(predicted, highlight=False)
    rows = []
    for stage, phases in enumerate(measured.phases):
        times = [f"{phases[phase]:.4f}" for phase in PHASES]
        peak = f"{measured.peak_bytes[stage] / 2**20:,.0f} MiB"
        rows.append((str(stage), *times, peak))
    columns = ("stage", *PHASES, "peak memory")
    console.print(_table("Seconds of a step by stage", columns, rows, "right"))


def _table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    justify: JustifyMethod,
) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="dim")
    for column in columns:
        table.add_column(column, justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def _render_verdict(verdict: StepComparison, console: Console) -> None:
    name, error = verdict.worst
    rows = []
    labels = ("loss", "loss of the next step")
    for label, (mine, reference) in zip(labels, verdict.losses, strict=True):
        judged = _judged(abs(mine / reference - 1.0))
        rows.append((label, f"{mine:.7f}", f"{reference:.7f}", *judged))
    judged = _judged(error)
    rows.append((f"{len(verdict.gradients)} gradients, worst {name}", "", "", *judged))
    columns = ("", "plan", "one process", "difference", "limit", "")
    console.print(_table("Against one process, float32, exact collectives", columns, rows, "left"))
    console.print()
    console.print(_bytes_table(verdict.bytes))
    extra = sum(entry.extra for entry in verdict.bytes)
    if extra:
        console.print(
            f"fully_shard keeps {extra:,.0f} bytes in all next to the parameters gathered for ZeRO-2: the "
            "parts that the optimizer steps, which the model does not count.",
            soft_wrap=True,
        )
    console.print()


def _bytes_table(entries: tuple[Bytes, ...]) -> Table:
    rows = []
    for rank in sorted({entry.rank for entry in entries}):
        mine = [entry for entry in entries if entry.rank == rank]
        cells = [f"{value:,.0f}" for entry in mine for value in (entry.measured, entry.predicted)]
        rows.append((str(rank), *cells, _word(all(entry.passed for entry in mine))))
    kinds = ("parameters", "predicted", "gradients", "predicted", "optimizer", "predicted")
    return _table("Bytes of state, rank by rank", ("rank", *kinds, ""), rows, "right")


def _judged(difference: float) -> tuple[str, str, str]:
    return f"{difference:.1e}", f"{TOLERANCE:g}", _word(difference <= TOLERANCE)


def _word(passed: bool) -> str:
    return "[green]equal[/green]" if passed else "[red]differs[/red]"
