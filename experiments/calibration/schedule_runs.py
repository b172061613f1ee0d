"""Runs of one model under several pipeline schedules, read from a file and priced by simulation."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from darts_parallel.cost.evaluation import hard_plan, pass_seconds
from darts_parallel.cost.simulation import PassSeconds, simulated_seconds
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.plan.chunk_placement import stages_a_device
from darts_parallel.problem import Problem, load_problem
from darts_parallel.problem.cluster import Device

NAMES = {
    "1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zbb": "zero_bubble_h1", "zbv": "zero_bubble_v",
    "v-half": "v_half", "v-min": "v_min",
}  # fmt: skip
"""Schedules as measured runs spell them."""
REFERENCE = "1f1b"
MODELS = {"Llama2-7B": "llama2_7b"}
FASTEST, SLOWEST = 0.1, 100.0
"""Of kernels, times as long as calibrated."""
SAME_FLOPS = 0.01
"""Relative; a depth whose FLOP differ by more is not the one that ran."""


@dataclass(frozen=True)
class MeasuredSchedule:
    """One measured run."""

    schedule: str
    tokens_per_s: float
    memory: float
    """In the file's unit; only ratios are used."""
    flops_per_token: float | None = None
    """As the run reports its FLOP/s over its tokens/s; None where it does not."""


@dataclass(frozen=True)
class MeasuredRuns:
    """Runs of one model on one node."""

    model: str
    """As shipped."""
    pp: int
    runs: tuple[MeasuredSchedule, ...]

    @property
    def reference(self) -> MeasuredSchedule:
        """The run under 1F1B."""
        return next(run for run in self.runs if run.schedule == REFERENCE)


def read_runs(path: str) -> MeasuredRuns:
    """Model, pipeline degree and runs of a file.

    Errors:
        ConfigError: the file cannot be read, or holds no run under 1F1B.
    """
    try:
        rows = list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise ConfigError(
            f"data={path} cannot be read ({error.strerror}); nearest legal: a CSV file."
        ) from None
    runs = []
    for row in rows:
        named = re.search(r"schedule ([\w-]+)", row.get("notes") or "")
        if named and named[1] in NAMES and row["model"] in MODELS:
            speed, reported = float(row["tokens_per_s_per_gpu"]), row.get("tflops_per_gpu")
            flops = float(reported) * 1e12 / speed if reported else None
            runs.append(MeasuredSchedule(NAMES[named[1]], speed, float(row["memory_gb"]), flops))
    if REFERENCE not in {run.schedule for run in runs}:
        raise ConfigError(
            f"data={path} must hold a run of {', '.join(MODELS)} under 1f1b; nearest legal: a file with "
            "`schedule 1f1b` among its notes."
        )
    return MeasuredRuns(MODELS[rows[0]["model"]], int(rows[0]["pp"]), tuple(runs))


@lru_cache(maxsize=64)
def problem_of(
    model: str,
    cluster: str,
    seq_len: int,
    count: int,
    blocks: int | None = None,
    slowdown: float = 1.0,
) -> Problem:
    """One pipeline of one micro-batch size, its messages beside the computation.

    Args:
        model, cluster: As shipped.
        seq_len: Tokens of a micro-batch.
        count: Micro-batches.
        blocks: Of the model; None: all of its own.
        slowdown: How many times as long as calibrated every kernel and every launch takes.
    """
    given = [f"model={model}", f"training={model}", f"cluster={cluster}", "space.schedules=[1f1b]"]
    job = [f"training.seq_len={seq_len}", f"training.global_batch_size={count}"]
    cut = [] if blocks is None else [f"model.num_layers={blocks}"]
    plain = load_problem([*given, *cut, *job, "cost.pipeline=simulated", "cost.p2p=overlapped"])
    groups = tuple(replace(group, device=_slower(group.device, slowdown)) for group in plain.cluster.groups)
    return replace(plain, cluster=replace(plain.cluster, groups=groups))


def _slower(device: Device, slowdown: float) -> Device:
    return replace(
        device,
        peak_flops=device.peak_flops / slowdown,
        memory_bandwidth=device.memory_bandwidth / slowdown,
        layer_overhead=device.layer_overhead * slowdown,
    )


def blocks_run(model: str, seq_len: int, flops_per_token: float | None) -> int:
    """Blocks with which a model has a token's FLOP; all of its own where none are reported or none fit."""

    def flops(blocks: int | None) -> float:
        problem = problem_of(model, "toy", seq_len, 8, blocks)
        return problem.model.flops_per_token(seq_len)

    whole = problem_of(model, "toy", seq_len, 8).model.config.num_layers
    if flops_per_token is None:
        return whole
    block = flops(2) - flops(1)
    found = max(round(1 + (flops_per_token - flops(1)) / block), 1)
    return found if abs(flops(found) / flops_per_token - 1.0) < SAME_FLOPS else whole


def slowdown_of(
    model: str, cluster: str, seq_len: int, pp: int, count: int, base: MeasuredSchedule
) -> float | None:
    """How many times as long as calibrated kernels must take for 1F1B to have its measured tokens/s.

    Efficiency belongs to device and software, and this software is not calibrated. None where the file does
    not say how many blocks ran, or where no such number gives the tokens/s.

    Args:
        model, cluster, seq_len: As in `problem_of`.
        pp, count: Of the plan.
        base: The run under 1F1B.
    """
    if base.flops_per_token is None:
        return None
    blocks = blocks_run(model, seq_len, base.flops_per_token)
    measured = count * seq_len / (base.tokens_per_s * pp)

    def late(slowdown: float) -> float:
        problem = problem_of(model, cluster, seq_len, count, blocks, slowdown)
        return predict(problem, REFERENCE, pp, count)[0] - measured

    if late(FASTEST) > 0 or late(SLOWEST) < 0:
        return None
    try:
        from scipy.optimize import brentq
    except ModuleNotFoundError:
        raise UnsupportedError(
            "the slowdown of kernels needs scipy; nearest legal: pip install 'darts-parallel[rivals]'."
        ) from None
    return float(brentq(late, FASTEST, SLOWEST, rtol=1e-6))


def predict(
    problem: Problem, schedule: str, pp: int, count: int, shares: Sequence[float] = ()
) -> tuple[float, float]:
    """Seconds of an iteration with an even split, and bytes of the fullest device.

    Args:
        problem: Of `problem_of`.
        schedule, pp, count: Of the plan.
        shares: Seconds of a backward pass of the input and of one of the weights over those of a forward one;
            empty: as the cost model says.
    """
    table, hard, cost = hard_plan(_even_plan(problem, schedule, pp, count), problem)
    seconds, size = float(cost.iteration_time), float(cost.memory.max())
    if shares:
        passes, counts = pass_seconds(table, hard), table.num_micro_batches[hard.outer]
        rows = [
            simulated_seconds(some, cost.sync_seconds, counts, pp, table.pipeline)[0]
            for some in (passes, _shared(passes, *shares))
        ]
        seconds += float(rows[1] - rows[0])
    return seconds, size


def _even_plan(problem: Problem, schedule: str, pp: int, count: int) -> Plan:
    chunks, blocks = stages_a_device(schedule) or 2, problem.model.config.num_layers
    stages = pp * chunks
    inner = [1 + k * blocks // stages for k in range(1, stages)]
    layers = (LayerStrategy(1, 1),) * problem.num_layers
    return Plan(count, (0, *inner, problem.num_layers), layers, virtual_stages=chunks, schedule=schedule)


def _shared(passes: PassSeconds, backward: float, weights: float) -> PassSeconds:
    """Passes of the same seconds in sum, of other lengths against each other."""
    unit = (passes.forward + passes.backward) / (1.0 + backward + weights)
    return PassSeconds(unit, (backward + weights) * unit, weights * unit, passes.message)


def shares_of(problem: Problem, pp: int, count: int) -> tuple[float, float]:
    """Shares of `predict` as the cost model has them, on a stage that holds blocks alone."""
    table, hard, _ = hard_plan(_even_plan(problem, REFERENCE, pp, count), problem)
    passes = pass_seconds(table, hard)
    forward, backward, weights = (
        float(row[0, pp // 2]) for row in (passes.forward, passes.backward, passes.weight_gradient)
    )
    return (backward - weights) / forward, weights / forward
