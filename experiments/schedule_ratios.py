"""Are pipeline schedules as fast against each other, and as large, as they were measured?

    python -m experiments.schedule_ratios data=FILE
    python -m experiments.schedule_ratios data=FILE micro_batches=[16,24,32] publish=true

Reads runs of one model under several schedules from a CSV file (columns as for validate_cost_model; a note
`schedule NAME` names the schedule), prices each by simulation, and compares throughput and memory with those
of 1F1B. Where the file does not print the batch, the number of micro-batches and `seq_len` are those of the
publisher's own configuration (AMD's Primus, tests/trainer/test_megatron_trainer_zero_bubble.yaml: 16 blocks
on 8 GPUs, 32 micro-batches of one sequence of 4,096 tokens); of several `micro_batches` the one nearest to
all runs is taken. How many blocks ran follows from the FLOP of a token, TFLOP/s over tokens/s: benchmarks cut
a model shorter and keep its name. Where that is known, every kernel takes as many times its calibrated
seconds as give 1F1B its measured tokens/s. Layers are split evenly; memory is that of the fullest device. A
second table gives every pass the `shares` of forward, backward and weights that the publisher's trace of
another model on the same software shows. Leaves ratios.csv and ratios.md; docs/where-it-is-off.md says what
was found on AMD's runs.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.config.schema import V_SHAPED
from darts_parallel.cost.pipeline import by_device, in_flight
from darts_parallel.errors import ConfigError
from darts_parallel.plan.chunk_placement import stages_a_device
from darts_parallel.plan.file import write_text
from darts_parallel.problem import Problem
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.calibration import schedule_runs
from experiments.calibration.schedule_runs import REFERENCE, MeasuredRuns, predict, read_runs
from experiments.results_page import publish as publish_page
from experiments.results_page import result_folder


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
class Ratios:
    """Throughput and memory of one schedule over those of 1F1B, measured and predicted."""

    schedule: str
    measured_speed: float
    predicted_speed: float
    measured_memory: float
    predicted_memory: float


def problem_run(options: RatioOptions, measured: MeasuredRuns, count: int) -> tuple[Problem, float | None]:
    """What ran, with one number of micro-batches, and how much slower kernels are; None: not known."""
    given = (measured.model, options.cluster, options.seq_len)
    slowdown = schedule_runs.slowdown_of(*given, measured.pp, count, measured.reference)
    blocks = schedule_runs.blocks_run(measured.model, options.seq_len, measured.reference.flops_per_token)
    return schedule_runs.problem_of(*given, count, blocks, slowdown or 1.0), slowdown


def compare(options: RatioOptions, count: int, shares: Sequence[float] = ()) -> list[Ratios]:
    """All schedules against 1F1B with one number of micro-batches, and `shares` of their passes."""
    measured = read_runs(options.data)
    problem, _ = problem_run(options, measured, count)
    found = {
        run.schedule: predict(problem, run.schedule, measured.pp, count, shares) for run in measured.runs
    }
    base, (seconds, size) = measured.reference, found[REFERENCE]
    return [
        Ratios(
            run.schedule,
            run.tokens_per_s / base.tokens_per_s,
            seconds / found[run.schedule][0],
            run.memory / base.memory,
            found[run.schedule][1] / size,
        )
        for run in measured.runs
    ]


def misfit(rows: list[Ratios]) -> float:
    """Mean distance of the logarithms of the speeds."""
    return float(np.mean([abs(np.log(row.predicted_speed / row.measured_speed)) for row in rows]))


def run(options: RatioOptions) -> int:
    """Compare, print and write; returns the exit status."""
    if not options.data:
        raise ConfigError("data is missing; write data=FILE, a CSV file of runs under several schedules.")
    measured = read_runs(options.data)
    pp = measured.pp
    odd = next((count for count in options.micro_batches if count % pp), None)
    if odd is not None and "interleaved" in {run.schedule for run in measured.runs}:
        raise ConfigError(
            f"micro_batches={odd} must be a multiple of pp={pp}, as interleaved stages need; nearest "
            f"legal: {max(round(odd / pp), 1) * pp}."
        )
    fits = {count: compare(options, count) for count in options.micro_batches}
    best = min(fits, key=lambda count: misfit(fits[count]))
    out = result_folder(options.out)
    text = table(fits, best, options)
    figures = [tuple(f"{value:.4f}" for value in astuple(row)[1:]) for row in fits[best]]
    lines = [(row.schedule, *some) for row, some in zip(fits[best], figures, strict=True)]
    write_text(out / "ratios.csv", csv_text([field.name for field in fields(Ratios)], lines))
    write_text(out / "ratios.md", text)
    print(text + f"\n{out}/ratios.csv, ratios.md")
    if options.publish:
        name = Path(options.data).name
        publish_page(
            "schedule_ratios", "Are schedules as fast against each other as they were measured?",
            f"python -m experiments.schedule_ratios data=FOLDER/{name}", text,
        )  # fmt: skip
    return 0


def table(fits: dict[int, list[Ratios]], best: int, options: RatioOptions) -> str:
    """Speeds and memory over those of 1F1B, as Markdown."""
    measured = read_runs(options.data)
    problem, slowdown = problem_run(options, measured, best)
    added = ""
    if slowdown is not None:
        added = f" Kernels take {slowdown:.2f} times their calibrated seconds: 1F1B then has its tokens/s."
    tried = ""
    if len(fits) > 1:
        distances = (f"{n}: {100 * misfit(rows):.1f} %" for n, rows in fits.items())
        tried = f", of several the nearest (mean distance by number: {', '.join(distances)})"
    blocks = problem.model.config.num_layers
    lines = [
        f"{blocks} blocks on {measured.pp} GPUs, by the FLOP of a token.{added} Sequences of "
        f"{options.seq_len} tokens, {best} micro-batches{tried}; nothing is fitted to the ratios.",
        "",
        *_as_markdown(fits[best]),
    ]
    for what in ("speed", "memory"):
        orders = [_order(fits[best], f"{source}_{what}") for source in ("measured", "predicted")]
        lines += ["", f"Order of {what}, measured: {orders[0]}; predicted: {orders[1]}."]
    lines += ["", memory_by_held(measured, problem, best)]
    if options.shares:
        own = schedule_runs.shares_of(problem, measured.pp, best)
        (backward, weights), rows = options.shares, compare(options, best, options.shares)
        lines += [
            "",
            f"The same total work with backward passes of the input {backward:.2f} and of the weights "
            f"{weights:.2f} times as long as forward passes (`shares`); the cost model has {own[0]:.2f} and "
            f"{own[1]:.2f}.",
            "",
            *_as_markdown(rows),
        ]
    return "\n".join(lines) + "\n"


def memory_by_held(measured: MeasuredRuns, problem: Problem, count: int) -> str:
    """What the measured memory says of a held half pass, and what the model does.

    Least squares of memory over half passes that the fullest device holds, and whether a device has both ends
    of the model.
    """
    pp, held = measured.pp, {}
    for run in measured.runs:
        chunks = stages_a_device(run.schedule) or 2
        counts = in_flight(pp, torch.tensor([count]), run.schedule, chunks)
        held[run.schedule] = round(float(by_device(counts, pp, run.schedule).max()) * 2 / chunks)
    both = [float(run.schedule in V_SHAPED) for run in measured.runs]
    memory = np.array([run.memory for run in measured.runs])
    columns = np.stack([np.ones(len(both)), [held[run.schedule] for run in measured.runs], both], axis=1)
    found = np.linalg.lstsq(columns, memory, rcond=None)[0]
    off = 100 * float(np.abs(columns @ found / memory - 1.0).max())
    few, many = (predict(problem, name, pp, count)[1] / 2**30 for name in (REFERENCE, "interleaved"))
    own = (many - few) / (held.get("interleaved", 3 * pp - 1) - held[REFERENCE])
    passes = ", ".join(f"{name} {number}" for name, number in held.items())
    return (
        f"Half passes that the fullest device holds: {passes}. Measured memory is {found[0]:.2f} + "
        f"{found[1]:.2f} for each, and {found[2]:.2f} more where a device has both ends of the model (least "
        f"squares, off by {off:.1f} % at most; used nowhere); the model's, in GiB, "
        f"{few - held[REFERENCE] * own:.2f} + {own:.2f} for each."
    )


def _as_markdown(rows: list[Ratios]) -> list[str]:
    header = ("schedule", "speed, measured", "predicted", "off by", "memory, measured", "predicted", "off by")
    lines = []
    for row in rows:
        speed, memory = (
            (f"{measured:.3f}", f"{predicted:.3f}", f"{100 * (predicted / measured - 1.0):+.1f} %")
            for measured, predicted in (astuple(row)[1:3], astuple(row)[3:])
        )
        lines.append((row.schedule, *speed, *memory))
    return markdown_table(header, lines)


def _order(rows: list[Ratios], key: str) -> str:
    """Schedules from the largest figure to the smallest."""
    return " > ".join(row.schedule for row in sorted(rows, key=lambda row: -float(getattr(row, key))))


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.schedule_ratios", __doc__, RatioOptions, run))
