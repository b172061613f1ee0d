"""Compare throughput and memory of pipeline schedules with those of 1F1B, measured and predicted.

    python -m experiments.schedule_ratios
    python -m experiments.schedule_ratios data=FILE micro_batches=24

Reads runs of one model under several schedules (experiments/data/schedules.csv, or a CSV file with its
columns) and prices each by simulation, layers split evenly. What the file does not print is that of the
publisher's own configuration (AMD's Primus, tests/trainer/test_megatron_trainer_zero_bubble.yaml: 16 blocks
on 8 GPUs, 32 micro-batches of one sequence of 4,096 tokens; the FLOP of a token, TFLOP/s over tokens/s, are
those of 16 blocks, too). Every kernel takes as many times its calibrated seconds as give 1F1B its measured
tokens/s. A second table gives every pass the shares of forward, backward and weights that the publisher's
trace of another model on the same framework shows; docs/where-it-is-off.md says what was found on AMD's runs.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from darts_parallel.config import require_at_least, run_main
from darts_parallel.cost import PassSeconds, hard_plan, pass_seconds, simulated_seconds
from darts_parallel.errors import ConfigError
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import Device, Problem, load_problem
from darts_parallel.report import markdown_table
from darts_parallel.schedules import find
from experiments.study import Report, Study, StudyOptions, run_study

SHIPPED = Path(__file__).parent / "data" / "schedules.csv"
NAMES = {
    "1f1b": "1f1b",
    "1f1b-interleaved": "interleaved",
    "zbb": "zero_bubble_h1",
    "zbv": "zero_bubble_v",
    "v-half": "v_half",
    "v-min": "v_min",
}
"""Schedules as measured runs spell them."""
REFERENCE = "1f1b"
FASTEST, SLOWEST = 0.1, 100.0
"""Bounds of the slowdown of kernels."""
PASSES = ("model", "trace")
"""Lengths of passes against each other: the cost model's, and those of a trace."""


MODEL, BLOCKS, SEQ_LEN, CLUSTER = "llama2_7b", 16, 4096, "mi300x_1x8"
"""Problem that ran: benchmarks cut a model shorter and keep its name."""
SHARES = (1.71, 0.78)
"""Seconds of a backward pass of the input and of one of the weights over a forward one, by the trace."""


@dataclass
class RatioOptions(StudyOptions):
    """Command line of `python -m experiments.schedule_ratios`."""

    jobs: int = 1
    data: str = str(SHIPPED)
    """CSV file of runs of the model, a stage a GPU."""
    micro_batches: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("micro_batches", self.micro_batches, 1)


@dataclass(frozen=True)
class MeasuredSchedule:
    """One measured run."""

    schedule: str
    pp: int
    tokens_per_s: float
    """Tokens per second and GPU."""
    memory: float
    """Memory in the file's unit; only ratios are used."""


@dataclass(frozen=True)
class Ratios:
    """Throughput and memory of one schedule over those of 1F1B, measured and predicted."""

    passes: str
    """Source of the lengths of passes, one of `PASSES`."""
    schedule: str
    measured_speed: float
    predicted_speed: float
    measured_memory: float
    predicted_memory: float


def read_runs(path: str) -> list[MeasuredSchedule]:
    """Read the runs of a file, that under 1F1B first.

    Errors:
        ConfigError: the file cannot be read, or holds no run under 1F1B.
    """
    try:
        rows = list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))
        runs = [
            MeasuredSchedule(
                NAMES[row["schedule"]],
                int(row["pp"]),
                float(row["tokens_per_s_per_gpu"]),
                float(row["memory_gb"]),
            )
            for row in rows
        ]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"data={path} cannot be read ({error}); try {SHIPPED}.") from None
    if REFERENCE not in {run.schedule for run in runs}:
        raise ConfigError(f"data={path} must hold a run under {REFERENCE}; try {SHIPPED}.")
    return sorted(runs, key=lambda run: run.schedule != REFERENCE)


@lru_cache(maxsize=64)
def problem_of(count: int, slowdown: float = 1.0) -> Problem:
    """Build one pipeline of one micro-batch size, its messages at the same time as the computation.

    Args:
        slowdown: Factor on the calibrated seconds of every kernel and every launch.
    """
    plain = load_problem(
        [
            f"model={MODEL}",
            f"training={MODEL}",
            f"cluster={CLUSTER}",
            "space.schedules=[1f1b]",
            f"model.num_layers={BLOCKS}",
            f"training.seq_len={SEQ_LEN}",
            f"training.global_batch_size={count}",
            "cost.pipeline=simulated",
            "cost.p2p=overlapped",
        ]
    )

    def slower(device: Device) -> Device:
        rates = {key: getattr(device, key) / slowdown for key in ("peak_flops", "memory_bandwidth")}
        return replace(device, **rates, layer_overhead=device.layer_overhead * slowdown)

    return plain.with_devices(slower)


def problem_run(count: int, base: MeasuredSchedule) -> tuple[Problem, float]:
    """Build what ran, and find how many times as long as calibrated kernels take.

    With that slowdown 1F1B has its measured tokens/s: efficiency belongs to device and framework, and this
    framework is not calibrated. It is 1 where no slowdown gives the tokens/s.
    """
    from scipy.optimize import brentq

    seconds = count * SEQ_LEN / (base.tokens_per_s * base.pp)

    def late(slowdown: float) -> float:
        return predict(problem_of(count, slowdown), REFERENCE, base.pp, count)[0] - seconds

    if late(FASTEST) > 0 or late(SLOWEST) < 0:
        return problem_of(count), 1.0
    slowdown = float(brentq(late, FASTEST, SLOWEST, rtol=1e-6))
    return problem_of(count, slowdown), slowdown


def predict(
    problem: Problem, schedule: str, pp: int, count: int, shares: Sequence[float] = ()
) -> tuple[float, float]:
    """Predict the seconds of an iteration with an even split, and the highest memory use of a device.

    Args:
        shares: Seconds of a backward pass of the input and of one of the weights over those of a forward one;
            empty: as the cost model says.
    """
    table, hard, cost = hard_plan(_even_plan(problem, schedule, pp, count), problem)
    seconds, size = float(cost.iteration_time), float(cost.memory.max())
    if shares:
        passes, counts = pass_seconds(table, hard), table.num_micro_batches[hard.outer]
        plain, reshaped = (
            simulated_seconds(some, cost.sync_seconds, counts, pp, table.pipeline)[0]
            for some in (passes, _shared(passes, *shares))
        )
        seconds += float(reshaped - plain)
    return seconds, size


def _even_plan(problem: Problem, schedule: str, pp: int, count: int) -> Plan:
    chunks, blocks = find(schedule).chunks or 2, problem.model.config.num_layers
    stages = pp * chunks
    inner = [1 + k * blocks // stages for k in range(1, stages)]
    layers = (LayerStrategy(1, 1),) * problem.num_layers
    return Plan(
        count, (0, *inner, problem.num_layers), layers, virtual_stages=chunks, schedule=schedule
    )


def _shared(passes: PassSeconds, backward: float, weights: float) -> PassSeconds:
    """Give passes other lengths against each other, and the same seconds in sum."""
    unit = (passes.forward + passes.backward) / (1.0 + backward + weights)
    return PassSeconds(unit, (backward + weights) * unit, weights * unit, passes.message)


def shares_of(problem: Problem, pp: int, count: int) -> tuple[float, float]:
    """Return the shares of `predict` as the cost model has them, on a stage that holds blocks alone."""
    table, hard, _ = hard_plan(_even_plan(problem, REFERENCE, pp, count), problem)
    passes = pass_seconds(table, hard)
    forward, backward, weights = (
        float(row[0, pp // 2]) for row in (passes.forward, passes.backward, passes.weight_gradient)
    )
    return (backward - weights) / forward, weights / forward


def compare(
    runs: Sequence[MeasuredSchedule], problem: Problem, count: int, shares: Sequence[float] = ()
) -> list[Ratios]:
    """Compare all schedules with the first, 1F1B, with `shares` of their passes."""
    base, passes = runs[0], PASSES[bool(shares)]
    seconds, size = predict(problem, REFERENCE, base.pp, count, shares)
    result = []
    for run in runs:
        own, memory = predict(problem, run.schedule, run.pp, count, shares)
        result.append(
            Ratios(
                passes,
                run.schedule,
                run.tokens_per_s / base.tokens_per_s,
                seconds / own,
                run.memory / base.memory,
                memory / size,
            )
        )
    return result


def run(options: RatioOptions) -> int:
    """Compare, print and write; returns the exit status."""
    runs, count = read_runs(options.data), options.micro_batches
    pp = runs[0].pp
    if count % pp and "interleaved" in {run.schedule for run in runs}:
        raise ConfigError(
            f"micro_batches={count} must be a multiple of pp={pp}, as interleaved stages need; "
            f"try {max(round(count / pp), 1) * pp}."
        )
    problem, slowdown = problem_run(count, runs[0])
    study = Study(
        "schedule_ratios",
        "Are schedules as fast against each other as they were measured?",
        "other models, nodes and numbers of micro-batches than those of the file.",
        partial(compare, runs, problem, count),
        partial(report, count, pp, problem, slowdown),
    )
    tasks = {"passes as the cost model has them": (), "passes of a trace": SHARES}
    return run_study(study, tasks, options)


def report(
    count: int, pp: int, problem: Problem, slowdown: float, rows: Sequence[Ratios]
) -> Report:
    """Write speeds and memory over those of 1F1B."""
    own, traced = ([row for row in rows if row.passes == passes] for passes in PASSES)
    note = (
        f"{BLOCKS} blocks on {pp} GPUs. Kernels take {slowdown:.2f} times their calibrated seconds: "
        f"1F1B then has its tokens/s. Sequences of {SEQ_LEN} tokens, {count} micro-batches; nothing is "
        "fitted to the ratios."
    )
    told = (
        "The same total work with backward passes of the input {:.2f} and of the weights {:.2f} times as "
        "long as forward passes; the cost model has {:.2f} and {:.2f}."
    ).format(*SHARES, *shares_of(problem, pp, count))
    return Report(note, _as_markdown(own), told, _as_markdown(traced))


def _as_markdown(rows: Sequence[Ratios]) -> list[str]:
    header = (
        "schedule",
        "speed, measured",
        "predicted",
        "off by",
        "memory, measured",
        "predicted",
        "off by",
    )
    lines = []
    for row in rows:
        speed, memory = (
            (f"{measured:.3f}", f"{predicted:.3f}", f"{100 * (predicted / measured - 1.0):+.1f} %")
            for measured, predicted in (
                (row.measured_speed, row.predicted_speed),
                (row.measured_memory, row.predicted_memory),
            )
        )
        lines.append((row.schedule, *speed, *memory))
    return markdown_table(header, lines)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.schedule_ratios", __doc__, RatioOptions, run))
