"""Are pipeline schedules as fast against each other, and as large, as they were measured?

    python -m experiments.schedule_ratios data=FILE
    python -m experiments.schedule_ratios data=FILE micro_batches=[16,24,32] publish=true

Reads runs of one model under several schedules from a CSV file (columns as for validate_cost_model; a note
`schedule NAME` names the schedule), prices each by simulation, and compares throughput and memory with those
of 1F1B. Where the file does not print the batch, the number of micro-batches and `seq_len` are those of the
publisher's own configuration (AMD's Primus, tests/trainer/test_megatron_trainer_zero_bubble.yaml: 16 blocks
on 8 GPUs, 32 micro-batches of one sequence of 4,096 tokens); of several `micro_batches` the one nearest to
all runs is taken. How many blocks ran follows from the FLOP of a token, TFLOP/s over tokens/s: benchmarks cut
a model shorter and keep its name. Where that is known, a block's overhead is what gives 1F1B its measured
tokens/s. Layers are split evenly; memory is that of the fullest device. A second table gives every pass the
`shares` of forward, backward and weights that the publisher's trace of another model on the same software
shows. Leaves ratios.csv and ratios.md.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import brentq

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.config.schema import V_SHAPED
from darts_parallel.cost.evaluation import hard_plan, pass_seconds
from darts_parallel.cost.pipeline import by_device, in_flight
from darts_parallel.cost.simulation import PassSeconds, simulated_seconds
from darts_parallel.errors import ConfigError
from darts_parallel.plan import LayerStrategy, Plan
from darts_parallel.plan.chunk_placement import stages_a_device
from darts_parallel.plan.file import write_text
from darts_parallel.problem import Problem, load_problem
from experiments.results_page import publish as publish_page

NAMES = {
    "1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zbb": "zero_bubble_h1", "zbv": "zero_bubble_v",
    "v-half": "v_half", "v-min": "v_min",
}  # fmt: skip
"""Schedules as measured runs spell them."""
REFERENCE = "1f1b"
ORDERS = """\
V-half and V-min run the passes in the order of AMD's scheduler, pass by pass (Primus,
primus/core/pipeline_parallel/scheduler/algorithms/zbv_greedy.py: the authors' building block, weights in its
gaps, everything moved together, backward passes first in the drain); for passes of equal seconds all six
schedules take what AMD's own simulator prints (its blog primus_pipeline.md: 117.0, 106.5, 103.0, 99.5, 104.5,
109.0 thousand)."""
SHARES = """\
The same total work with passes as long against each other as in AMD's trace of a larger model under V-min on
this software (imgs/actual-perf.png of that blog: 32 passes a kind on each of 8 GPUs, widths read off to about
5 %): a backward pass of the input is {0:.2f} and one of the weights {1:.2f} times as long as a forward pass;
the cost model has {2:.2f} and {3:.2f} here. No figure of the runs below went into these two."""
V_MIN = """\
V-min repeats its passes without slack: with 8 devices the way of a micro-batch down and up the V and back
(17 forward passes, 17 backward ones without the weights' gradient, 2 of weights, 32 messages) is as long as
six micro-batches of work (12 of each) only where all passes take equal seconds and messages none. It loses
what passes of weights are shorter than the others, and every message; other schedules have room for both."""
MEMORY = """\
Memory is missed although the passes are held as AMD's own simulator counts them. Its figures are {0:.2f} GiB,
{1:.2f} for each of the half passes that the fullest device holds ({3}) and {2:.2f} more for a device with
both ends of the model, all to {4:.1f} %: least squares, to say where the model differs, used nowhere.
The model has {5:.2f} GiB a half pass and {6:.2f} without any. So little is no Adam in float32 (18 bytes a
parameter), and the sources do not say which state the runs kept. The last device of ZB-H1 is overrated, too:
the model keeps 6 bytes a logit until the weights' gradient, Primus 2 (core/extensions/zbpp_gemm.py)."""
MODELS = {"Llama2-7B": "llama2_7b"}
MOST_OVERHEAD_US = 1e5
SAME_FLOPS = 0.01
"""Relative; a depth whose FLOP differ by more is not the one that ran."""


@dataclass
class RatioOptions:
    """Which runs, and what they do not print."""

    data: str = ""
    """CSV file of runs of one model on one node."""
    out: str = "outputs/schedule_ratios"
    micro_batches: list[int] = field(default_factory=lambda: [32])
    shares: list[float] = field(default_factory=lambda: [1.71, 0.78])
    """Seconds of a backward pass of the input and of one of the weights over a forward one; may be empty."""
    seq_len: int = 4096
    cluster: str = "mi300x_1x8"
    publish: bool = False
    """Write experiments/results/schedule_ratios.md, too."""

    def __post_init__(self) -> None:
        for value in self.micro_batches:
            require_at_least("micro_batches", value, 1)
        require_at_least("seq_len", self.seq_len, 1)
        if len(self.shares) not in (0, 2) or any(share <= 0 for share in self.shares):
            raise ConfigError(
                f"shares={self.shares} must be two numbers above 0, a backward and a weight pass over a "
                "forward one; nearest legal: [1.71,0.78]."
            )


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
class Ratios:
    """Throughput and memory of one schedule over those of 1F1B, measured and predicted."""

    schedule: str
    measured_speed: float
    predicted_speed: float
    measured_memory: float
    predicted_memory: float


def read_runs(path: str) -> tuple[str, int, list[MeasuredSchedule]]:
    """Shipped model, pipeline degree and runs of a file.

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
    return MODELS[rows[0]["model"]], int(rows[0]["pp"]), runs


@lru_cache(maxsize=64)
def problem_of(
    model: str,
    cluster: str,
    seq_len: int,
    count: int,
    blocks: int | None = None,
    overhead: float | None = None,
) -> Problem:
    """One pipeline of one micro-batch size, its messages beside the computation.

    Args:
        model, cluster: As shipped.
        seq_len: Tokens of a micro-batch.
        count: Micro-batches.
        blocks: Of the model; None: all of its own.
        overhead: Microseconds of every block besides its kernels, forward; None: as shipped.
    """
    given = [f"model={model}", f"training={model}", f"cluster={cluster}", "space.schedules=[1f1b]"]
    job = [f"training.seq_len={seq_len}", f"training.global_batch_size={count}"]
    cut = [] if blocks is None else [f"model.num_layers={blocks}"]
    plain = load_problem([*given, *cut, *job, "cost.pipeline=simulated", "cost.p2p=overlapped"])
    if overhead is None:
        return plain
    groups = tuple(
        replace(group, device=replace(group.device, layer_overhead=overhead * 1e-6))
        for group in plain.cluster.groups
    )
    return replace(plain, cluster=replace(plain.cluster, groups=groups))


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


def overhead_of(options: RatioOptions, count: int) -> float | None:
    """Microseconds of a block with which 1F1B has its measured tokens/s.

    None where the file does not say how many blocks ran, or where the model is slower without any.
    """
    model, pp, runs = read_runs(options.data)
    base = next(run for run in runs if run.schedule == REFERENCE)
    if base.flops_per_token is None:
        return None
    blocks = blocks_run(model, options.seq_len, base.flops_per_token)
    measured = count * options.seq_len / (base.tokens_per_s * pp)

    def late(overhead: float) -> float:
        problem = problem_of(model, options.cluster, options.seq_len, count, blocks, overhead)
        return predict(problem, REFERENCE, pp, count)[0] - measured

    return None if late(0.0) > 0 else float(brentq(late, 0.0, MOST_OVERHEAD_US, rtol=1e-6))


def predict(
    problem: Problem, schedule: str, pp: int, count: int, shares: Sequence[float] = ()
) -> tuple[float, float]:
    """Seconds of an iteration with an even split, and bytes of the fullest device.

    Args:
        problem: Of `problem_of`.
        schedule, pp, count: Of the plan.
        shares: As in `RatioOptions`; empty: passes as long as the cost model says.
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
    """`RatioOptions.shares` as the cost model has them, on a stage that holds blocks alone."""
    table, hard, _ = hard_plan(_even_plan(problem, REFERENCE, pp, count), problem)
    passes = pass_seconds(table, hard)
    forward, backward, weights = (
        float(row[0, pp // 2]) for row in (passes.forward, passes.backward, passes.weight_gradient)
    )
    return (backward - weights) / forward, weights / forward


def problem_run(options: RatioOptions, count: int) -> Problem:
    """What ran, with one number of micro-batches."""
    model, _, runs = read_runs(options.data)
    blocks = blocks_run(model, options.seq_len, runs[0].flops_per_token)
    return problem_of(model, options.cluster, options.seq_len, count, blocks, overhead_of(options, count))


def compare(options: RatioOptions, count: int, shares: Sequence[float] = ()) -> list[Ratios]:
    """All schedules against 1F1B with one number of micro-batches, and `shares` of their passes."""
    _, pp, runs = read_runs(options.data)
    problem = problem_run(options, count)
    found = {run.schedule: predict(problem, run.schedule, pp, count, shares) for run in runs}
    base, (seconds, size) = next(r for r in runs if r.schedule == REFERENCE), found[REFERENCE]
    return [
        Ratios(
            run.schedule,
            run.tokens_per_s / base.tokens_per_s,
            seconds / found[run.schedule][0],
            run.memory / base.memory,
            found[run.schedule][1] / size,
        )
        for run in runs
    ]


def misfit(rows: list[Ratios]) -> float:
    """Mean distance of the logarithms of the speeds."""
    return float(np.mean([abs(np.log(row.predicted_speed / row.measured_speed)) for row in rows]))


def run(options: RatioOptions) -> int:
    """Compare, print and write; returns the exit status."""
    if not options.data:
        raise ConfigError("data is missing; write data=FILE, a CSV file of runs under several schedules.")
    _, pp, runs = read_runs(options.data)
    odd = next((count for count in options.micro_batches if count % pp), None)
    if odd is not None and "interleaved" in {run.schedule for run in runs}:
        raise ConfigError(
            f"micro_batches={odd} must be a multiple of pp={pp}, as interleaved stages need; nearest "
            f"legal: {max(round(odd / pp), 1) * pp}."
        )
    fits = {count: compare(options, count) for count in options.micro_batches}
    best = min(fits, key=lambda count: misfit(fits[count]))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    text = table(fits, best, options)
    write_text(out / "ratios.csv", as_csv(fits[best]))
    write_text(out / "ratios.md", text)
    print(text + f"\n{out}/ratios.csv, ratios.md")
    if options.publish:
        name = Path(options.data).name
        publish_page(
            "schedule_ratios", "Are schedules as fast against each other as they were measured?",
            f"python -m experiments.schedule_ratios data=FOLDER/{name}", text,
        )  # fmt: skip
    return 0


def as_csv(rows: list[Ratios]) -> str:
    """One line a schedule."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("schedule", "measured_speed", "predicted_speed", "measured_memory", "predicted_memory"))
    for row in rows:
        figures = (row.measured_speed, row.predicted_speed, row.measured_memory, row.predicted_memory)
        writer.writerow((row.schedule, *(f"{value:.4f}" for value in figures)))
    return file.getvalue()


def table(fits: dict[int, list[Ratios]], best: int, options: RatioOptions) -> str:
    """Speeds and memory over those of 1F1B, as Markdown."""
    model, pp, runs = read_runs(options.data)
    blocks, overhead = blocks_run(model, options.seq_len, runs[0].flops_per_token), overhead_of(options, best)
    added = "" if overhead is None else f" {overhead:.0f} us of overhead a block: 1F1B then has its tokens/s."
    tried = ""
    if len(fits) > 1:
        distances = (f"{n}: {100 * misfit(rows):.1f} %" for n, rows in fits.items())
        tried = f", of several the nearest (mean distance by number: {', '.join(distances)})"
    lines = [
        f"{blocks} blocks on {pp} GPUs, by the FLOP of a token.{added} Sequences of {options.seq_len} "
        f"tokens, {best} micro-batches{tried}; nothing is fitted to the ratios.",
        "",
        *_as_markdown(fits[best]),
    ]
    for what in ("speed", "memory"):
        orders = [_order(fits[best], f"{source}_{what}") for source in ("measured", "predicted")]
        lines += ["", f"Order of {what}, measured: {orders[0]}; predicted: {orders[1]}."]
    lines += ["", ORDERS, "", V_MIN, "", memory_by_held(options, best)]
    if options.shares:
        own = shares_of(problem_run(options, best), pp, best)
        rows = compare(options, best, options.shares)
        lines += ["", SHARES.format(*options.shares, *own), "", *_as_markdown(rows)]
    return "\n".join(lines) + "\n"


def memory_by_held(options: RatioOptions, count: int) -> str:
    """What the measured bytes say of a held pass, and what the model does."""
    _, pp, runs = read_runs(options.data)
    held = {}
    for run in runs:
        chunks = stages_a_device(run.schedule) or 2
        counts = in_flight(pp, torch.tensor([count]), run.schedule, chunks)
        held[run.schedule] = round(float(by_device(counts, pp, run.schedule).max()) * 2 / chunks)
    both = [float(run.schedule in V_SHAPED) for run in runs]
    measured = np.array([run.memory for run in runs])
    columns = np.stack([np.ones(len(runs)), [held[run.schedule] for run in runs], both], axis=1)
    found = np.linalg.lstsq(columns, measured, rcond=None)[0]
    problem = problem_run(options, count)
    few, many = (predict(problem, name, pp, count)[1] / 2**30 for name in (REFERENCE, "interleaved"))
    step = (many - few) / (held.get("interleaved", 3 * pp - 1) - held[REFERENCE])
    return MEMORY.format(
        *found,
        ", ".join(f"{name} {number}" for name, number in held.items()),
        100 * float(np.abs(columns @ found / measured - 1.0).max()),
        step,
        few - held[REFERENCE] * step,
    )


def _as_markdown(rows: list[Ratios]) -> list[str]:
    lines = [
        "| schedule | speed, measured | predicted | off by | memory, measured | predicted | off by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        speed = row.predicted_speed / row.measured_speed - 1.0
        memory = row.predicted_memory / row.measured_memory - 1.0
        lines.append(
            f"| {row.schedule} | {row.measured_speed:.3f} | {row.predicted_speed:.3f} | {100 * speed:+.1f} % "
            f"| {row.measured_memory:.3f} | {row.predicted_memory:.3f} | {100 * memory:+.1f} % |"
        )
    return lines


def _order(rows: list[Ratios], key: str) -> str:
    """Schedules from the largest figure to the smallest."""
    return " > ".join(sorted((row.schedule for row in rows), key=lambda name: -_figure(rows, name, key)))


def _figure(rows: list[Ratios], schedule: str, key: str) -> float:
    return float(next(getattr(row, key) for row in rows if row.schedule == schedule))


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.schedule_ratios", __doc__, RatioOptions, run))
