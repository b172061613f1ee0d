"""How far are predicted seconds from measured ones, and is their order right? On plans that run here.

    torchrun --nproc-per-node 2 -m experiments.profile name=here          # measure this machine first
    python -m experiments.measured_vs_predicted cluster=outputs/measured/cluster/here.yaml
    python -m experiments.measured_vs_predicted devices=4 share_cores=true     # noisy

Every uniform plan of `devices` processes with the micro-batches and ZeRO stages of the options trains a small
model on this machine; all plans are built once and take their steps in turn, so that a slow moment of the
machine meets all of them. The medians stand beside the prediction of the cost model, with Spearman's rank
correlation. It writes `measured_vs_predicted.csv` and a picture into `out`. A process needs a core of its
own: where two share one, each message waits until the scheduler lets the other process run, and the order of
the plans becomes that of their messages. Read the spread beside the median.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from darts_parallel.config.checks import require_at_least, require_size
from darts_parallel.config.options import run_main
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError, UnsupportedError
from darts_parallel.plan.file import write_text
from darts_parallel.plan.legality import refuse_unexecutable
from darts_parallel.plan.space import layer_choices, outer_spaces
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import csv_of, filled_table, markdown_table
from darts_parallel.run.hardware import require_torch
from darts_parallel.run.settings import measured_cluster
from experiments.calibration.errors import spearman
from experiments.results_page import publish, result_folder

MODEL = ("model=toy", "model.hidden_size=256", "model.num_heads=8", "model.vocab_size=1024", "training=toy")


def usable_cores() -> int:
    """Cores on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass
class MeasuredOptions:
    """Which plans run, how often, and with which predictions."""

    devices: int = 2
    """Processes, at most one a core."""
    share_cores: bool = False
    """More processes than cores all the same."""
    cluster: str = ""
    """The cluster file of `experiments.profile`, made with as many processes; empty: conf/cluster/cpu_1x4."""
    micro_batches: list[int] = field(default_factory=lambda: [1, 4])
    zero_stages: list[int] = field(default_factory=lambda: [0, 3])
    recompute: list[str] = field(default_factory=lambda: ["none"])
    repeats: int = 5
    """Steps of every plan, in turn."""
    seed: int = 0
    timeout_s: float = 60.0
    overrides: list[str] = field(default_factory=list)
    """Hydra overrides of the model and the job, e.g. `[model.num_layers=8]`."""
    out: str = "outputs/measured_vs_predicted"
    publish: bool = False
    """Write experiments/results/measured_vs_predicted.md, too."""

    def __post_init__(self) -> None:
        require_size("devices", self.devices, 1024)
        cores = usable_cores()
        if self.devices > cores and not self.share_cores:
            raise ConfigError(
                f"devices={self.devices} must be at most the {cores} cores of this machine unless "
                f"share_cores=true; try {cores}."
            )
        require_size("repeats", self.repeats, 10**6)
        require_at_least("timeout_s", self.timeout_s, 0, strict=True)


@dataclass(frozen=True)
class Row:
    """One plan."""

    plan: str
    predicted_s: float
    measured_s: float
    """Median over repeats of the slowest process."""
    fastest_s: float
    slowest_s: float


def problem_of(options: MeasuredOptions) -> Problem:
    """The small model on as many processes of this machine."""
    node = f"{{count: 1, gpus: {options.devices}, device: cpu, intra_node: "
    node += "{bandwidth_GBps: 1.0, latency_us: 100.0, shared: true}}"
    space = [f"space.zero_stage={options.zero_stages}", f"space.num_micro_batches={options.micro_batches}"]
    space += [f"space.recompute={options.recompute}", "space.sequence_parallel=false"]
    overrides = ["experiment=run_here", f"cluster.nodes=[{node}]", *MODEL, "training.precision=fp32"]
    return measured_cluster(load_problem([*overrides, *space, *options.overrides]), options.cluster)


def uniform_plans(problem: Problem) -> list[Plan]:
    """Every uniform plan of the space with even stages.

    Layers that are no blocks share the first and the last stage, as trainers do it.
    """
    plans = []
    for space in outer_spaces(problem):
        edges = _even_edges(problem, space.pp)
        for count in space.num_micro_batches:
            for choice in layer_choices(problem, problem.cluster.num_devices // space.pp):
                if problem.training.global_batch_size % (choice.dp * count) == 0:
                    plan = Plan(count, edges, (choice,) * problem.num_layers)
                    try:
                        refuse_unexecutable(plan, problem)
                    except UnsupportedError:
                        continue
                    plans.append(plan)
    return plans


def _even_edges(problem: Problem, pp: int) -> tuple[int, ...]:
    blocks = [i for i, layer in enumerate(problem.model.layers) if layer.recomputable]
    inner = [blocks[round(k * len(blocks) / pp)] for k in range(1, pp)] if pp <= len(blocks) else None
    starts = inner if inner is not None else list(range(1, pp))
    return (0, *starts, problem.num_layers)


def measure_in_turn(problem: Problem, plans: Sequence[Plan], repeats: int, seed: int) -> list[list[float]]:
    """A job of every process: seconds of every plan's steps, `(plans, repeats)`, after one warm-up."""
    import torch

    from darts_parallel.run.engine import Engine
    from darts_parallel.run.measure import timed_step

    engines = [Engine(problem, plan, "1f1b", seed, torch.device("cpu")) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for repeat in range(repeats + 1):
        for index, engine in enumerate(engines):
            took, _ = timed_step(engine, seed, repeat)
            if repeat:
                seconds[index].append(took)
    return seconds


def figure_of(rows: Sequence[Row], correlation: float) -> Figure:
    """Measured over predicted seconds, both logarithmic; bars span fastest to slowest step."""
    figure = Figure(figsize=(7.0, 5.5), layout="constrained")
    axes = figure.subplots()
    predicted, measured = [row.predicted_s for row in rows], [row.measured_s for row in rows]
    below = [row.measured_s - row.fastest_s for row in rows]
    above = [row.slowest_s - row.measured_s for row in rows]
    axes.errorbar(predicted, measured, yerr=[below, above], fmt="o", color="#4878a8", capsize=2, markersize=4)
    low, high = min(predicted + measured), max(predicted + measured)
    axes.plot([low, high], [low, high], color="#8a8a8a", linewidth=0.8, linestyle="--", label="equal")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted s per iteration")
    axes.set_ylabel("measured s per iteration")
    axes.set_title(f"{len(rows)} plans, rank correlation {correlation:.2f}", fontsize=10, loc="left")
    axes.legend(frameon=False)
    FigureCanvasAgg(figure)
    return figure


HEADER = ("plan", "predicted s", "measured s", "fastest", "slowest", "measured / predicted")


def cells_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's lines under `HEADER`, fastest measured plan first."""
    lines = []
    for row in sorted(rows, key=lambda row: row.measured_s):
        seconds = (row.predicted_s, row.measured_s, row.fastest_s, row.slowest_s)
        lines.append((row.plan, *(f"{s:.4f}" for s in seconds), f"{row.measured_s / row.predicted_s:.2f}"))
    return lines


def sentence_of(rows: Sequence[Row], options: MeasuredOptions, correlation: float) -> str:
    """What came out, in one line."""
    ratio = median(row.measured_s / row.predicted_s for row in rows)
    return (
        f"{len(rows)} plans of {options.devices} processes on {usable_cores()} cores: rank correlation "
        f"{correlation:.3f}, median measured / predicted {ratio:.2f}; medians of {options.repeats} steps."
    )


def publish_rows(rows: Sequence[Row], options: MeasuredOptions, correlation: float, picture: Path) -> None:
    """The page of results."""
    text = "\n".join([sentence_of(rows, options, correlation), "", *markdown_table(HEADER, cells_of(rows))])
    cluster = " cluster=outputs/measured/cluster/here.yaml" if options.cluster else ""
    command = f"python -m experiments.measured_vs_predicted{cluster}"
    if options.cluster:
        command = f"torchrun --nproc-per-node {options.devices} -m experiments.profile name=here && {command}"
    captions = {picture: "measured over predicted seconds, bars from the fastest to the slowest step"}
    publish("measured_vs_predicted", "Are plans that run here ranked as predicted?", command, text, captions)


def run(options: MeasuredOptions) -> int:
    """Measure, print, and write."""
    require_torch()
    from darts_parallel.run.workers import Workers

    problem = problem_of(options)
    plans = uniform_plans(problem)
    predicted = [evaluate(plan, problem).iteration_time_s for plan in plans]
    folder = result_folder(options.out)
    with Workers(options.devices, options.timeout_s) as workers:
        times = workers.run(measure_in_turn, problem, plans, options.repeats, options.seed)[0]
    batch = problem.training.global_batch_size
    rows = [
        Row(plan.describe(batch), seconds, median(took), min(took), max(took))
        for plan, seconds, took in zip(plans, predicted, times, strict=True)
    ]
    correlation = spearman(predicted, [row.measured_s for row in rows])
    console = Console()
    console.print(filled_table("", HEADER, cells_of(rows)))
    console.print(sentence_of(rows, options, correlation), highlight=False, soft_wrap=True)
    write_text(folder / "measured_vs_predicted.csv", csv_of(Row, rows))
    picture = folder / "measured_vs_predicted.png"
    figure_of(rows, correlation).savefig(picture, dpi=120)
    if options.publish:
        publish_rows(rows, options, correlation, picture)
    print(f"written: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main("measured_vs_predicted", __doc__, MeasuredOptions, run))
