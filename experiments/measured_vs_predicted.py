"""How far are predicted seconds from measured ones, and is their order right? On plans that run here.

    torchrun --nproc-per-node 2 -m experiments.profile name=here          # measure this machine first
    python -m experiments.measured_vs_predicted cluster=outputs/measured/cluster/here.yaml
    python -m experiments.measured_vs_predicted devices=4 share_cores=true     # noisy

Every uniform plan of `devices` processes with 1 or 4 micro-batches and ZeRO-0 or ZeRO-3 trains a small
model on this machine; all plans are built once and take their steps alternately, so that a slow moment of the
machine meets all of them. The medians stand next to the prediction of the cost model, with Spearman's rank
correlation. It writes `measured_vs_predicted.csv` and a picture into `out`. A process needs a core of its
own: where two share one, each message waits until the scheduler lets the other process run, and the order of
the plans becomes that of their messages. Read the spread with the median.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from matplotlib.figure import Figure

from darts_parallel.config import require_within, run_main
from darts_parallel.cost import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plan import Plan, layer_choices, outer_spaces
from darts_parallel.problem import Problem, load_problem
from darts_parallel.report import markdown_table
from darts_parallel.run import measured_cluster, require_torch
from experiments.calibration.errors import spearman
from experiments.study import Report, Study, StudyOptions, run_study

MODEL = ("model=toy", "model.hidden_size=256", "model.num_heads=8", "model.vocab_size=1024", "training=toy",
         "training.precision=fp32", "space.zero_stage=[0,3]", "space.num_micro_batches=[1,4]",
         "space.recompute=none", "space.sequence_parallel=false")  # fmt: skip
TIMEOUT_S = 60.0
"""Seconds after which a process that says nothing is taken for lost."""


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@dataclass
class MeasuredOptions(StudyOptions):
    """Which plans run, how often, and with which predictions."""

    devices: int = 2
    """Processes, at most one a core."""
    share_cores: bool = False
    """More processes than cores all the same."""
    cluster: str = ""
    """The cluster file of `experiments.profile`, made with as many processes; empty: conf/cluster/cpu_1x4."""
    repeats: int = 5
    """Steps of every plan, alternately."""
    seed: int = 0
    overrides: list[str] = field(default_factory=list)
    """Hydra overrides of model, job and space, e.g. `[model.num_layers=8,space.zero_stage=0]`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_within("devices", self.devices, 1, 1024)
        cores = usable_cores()
        if self.devices > cores and not self.share_cores:
            raise ConfigError(
                f"devices={self.devices} must be at most the {cores} cores of this machine unless "
                f"share_cores=true; try {cores}."
            )
        require_within("repeats", self.repeats, 1, 10**6)


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan."""

    plan: str
    predicted_s: float
    measured_s: float
    """Median over repeats of the slowest process."""
    fastest_s: float
    slowest_s: float


def problem_of(options: MeasuredOptions) -> Problem:
    """Compose the small model on as many processes of this machine."""
    node = f"{{count: 1, gpus: {options.devices}, device: cpu, intra_node: "
    node += "{bandwidth_GBps: 1.0, latency_us: 100.0, shared: true}}"
    overrides = ["experiment=run_here", f"cluster.nodes=[{node}]", *MODEL, *options.overrides]
    return measured_cluster(load_problem(overrides), options.cluster)


def uniform_plans(problem: Problem) -> list[Plan]:
    """List every uniform plan of the space with even stages.

    Layers that are no blocks share the first and the last stage, as trainers do it.
    """
    batch = problem.training.global_batch_size
    return [
        Plan(count, _even_edges(problem, space.pp), (choice,) * problem.num_layers)
        for space in outer_spaces(problem)
        for count in space.num_micro_batches
        for choice in layer_choices(problem, problem.cluster.num_devices // space.pp)
        if batch % (choice.dp * count) == 0
    ]


def _even_edges(problem: Problem, pp: int) -> tuple[int, ...]:
    blocks = [i for i, layer in enumerate(problem.model.layers) if layer.recomputable]
    inner = [blocks[round(k * len(blocks) / pp)] for k in range(1, pp)] if pp <= len(blocks) else range(1, pp)
    return (0, *inner, problem.num_layers)


def measure_in_turn(problem: Problem, plans: Sequence[Plan], repeats: int, seed: int) -> list[list[float]]:
    """Time every plan's steps as a job of every process: `(plans, repeats)`, seconds, after one warm-up."""
    import torch

    from darts_parallel.run import Engine, timed_step

    engines = [Engine(problem, plan, seed, torch.device("cpu")) for plan in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for repeat in range(repeats + 1):
        for index, engine in enumerate(engines):
            took, _ = timed_step(engine, seed, repeat)
            if repeat:
                seconds[index].append(took)
    return seconds


def measured_plans(options: MeasuredOptions) -> list[MeasuredPlan]:
    """Predict and measure every plan."""
    from darts_parallel.run import Workers

    problem = problem_of(options)
    plans = uniform_plans(problem)
    predicted = [evaluate(plan, problem).iteration_time_s for plan in plans]
    with Workers(options.devices, TIMEOUT_S) as workers:
        times = workers.run(measure_in_turn, problem, plans, options.repeats, options.seed)[0]
    batch = problem.training.global_batch_size
    return [
        MeasuredPlan(plan.describe(batch), seconds, median(took), min(took), max(took))
        for plan, seconds, took in zip(plans, predicted, times, strict=True)
    ]


def report(rows: Sequence[MeasuredPlan], options: MeasuredOptions) -> Report:
    """Return the table, fastest measured plan first, the rank correlation, and the picture."""
    rows = sorted(rows, key=lambda row: row.measured_s)
    correlation = spearman([row.predicted_s for row in rows], [row.measured_s for row in rows])
    ratio = median(row.measured_s / row.predicted_s for row in rows)
    verdict = (
        f"{len(rows)} plans of {options.devices} processes on {usable_cores()} cores: rank correlation "
        f"{correlation:.3f}, median measured / predicted {ratio:.2f}; medians of {options.repeats} steps."
    )
    header = ("plan", "predicted s", "measured s", "fastest", "slowest", "measured / predicted")
    lines = []
    for row in rows:
        seconds = (row.predicted_s, row.measured_s, row.fastest_s, row.slowest_s)
        lines.append((row.plan, *(f"{s:.4f}" for s in seconds), f"{row.measured_s / row.predicted_s:.2f}"))
    caption = "measured over predicted seconds, bars from the fastest to the slowest step"
    picture = (figure_of(rows, correlation), caption)
    return Report(verdict, markdown_table(header, lines), pictures={"measured_vs_predicted.png": picture})


def figure_of(rows: Sequence[MeasuredPlan], correlation: float) -> Figure:
    """Draw measured over predicted seconds, both logarithmic; bars span fastest to slowest step.

    Points are numbered in the order of the rows, whose plans stand to the right.
    """
    figure = Figure(figsize=(10.0, 5.5), layout="constrained")
    axes = figure.subplots()
    predicted, measured = [row.predicted_s for row in rows], [row.measured_s for row in rows]
    below = [row.measured_s - row.fastest_s for row in rows]
    above = [row.slowest_s - row.measured_s for row in rows]
    axes.errorbar(predicted, measured, yerr=[below, above], fmt="o", color="#4878a8", capsize=2, markersize=4)
    names = [f"{number}  {row.plan}" for number, row in enumerate(rows, 1)]
    axes.text(1.02, 1.0, "\n".join(names), transform=axes.transAxes, va="top", fontsize=7, linespacing=1.6)
    for number, point in enumerate(zip(predicted, measured, strict=True), 1):
        side = 6 if number % 2 else -6  # close points are close in their order, too
        axes.annotate(str(number), point, (side, 0), textcoords="offset points", fontsize=8,
                      ha="left" if number % 2 else "right", va="center")  # fmt: skip
    low, high = min(predicted + measured), max(predicted + measured)
    axes.plot([low, high], [low, high], color="#8a8a8a", linewidth=0.8, linestyle="--", label="equal")
    labels = {"xlabel": "predicted s per iteration", "ylabel": "measured s per iteration"}
    axes.set(xscale="log", yscale="log", **labels)
    axes.set_title(f"{len(rows)} plans, rank correlation {correlation:.2f}", fontsize=10, loc="left")
    axes.legend(frameon=False)
    return figure


def run(options: MeasuredOptions) -> int:
    """Measure and report; return the exit status."""
    require_torch()
    limits = "GPUs, and more than one machine: processes here share its memory."
    question = "Are plans that run here ranked as predicted?"
    study = Study("measured_vs_predicted", question, limits, measured_plans, partial(report, options=options))
    return run_study(study, {"all plans": options}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("measured_vs_predicted", __doc__, MeasuredOptions, run))
