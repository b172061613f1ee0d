"""Which nodes to rent: hours against dollars of a job over all choices of nodes of an offer.

    python -m experiments.pareto

Every choice of counts is a cluster of its own; the best uniform plans of all of them are searched in one
batch. The default is the study of FASOP (HPDC'24): up to 8 nodes of 8 A100 and 8 of 8 A10.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from matplotlib.figure import Figure

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.planner.node_choice import Rental, pareto_front, rentals
from darts_parallel.problem.orders import order_label
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

FASOP = ["model=gpt2_xl", "training=gpt2_xl", "cluster=offer_a100_a10", "space=uniform"]


@dataclass
class ParetoOptions(StudyOptions):
    """Command line of `python -m experiments.pareto`."""

    overrides: list[str] = field(default_factory=lambda: list(FASOP))
    """Hydra overrides of the problem; its cluster is the offer."""
    num_iterations: float = 12.5e6
    config_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("num_iterations", self.num_iterations, 0, strict=True)


@dataclass(frozen=True)
class NodeChoice:
    """Hold one choice of nodes with its best plan."""

    nodes: str
    seconds_per_iteration: float
    hours: float
    dollars: float
    on_front: bool
    """Whether no other choice is faster and cheaper."""
    plan: str
    node_order: str
    """Devices along the pipeline."""
    layers: str
    """Layers of every stage."""
    cpu_seconds: float
    """CPU seconds of the search of all choices."""


def search_offer(options: ParetoOptions) -> list[NodeChoice]:
    """Search all choices of nodes in one batch."""
    job = ["objective=cost", f"objective.num_iterations={options.num_iterations}"]
    problem = load_problem([*options.overrides, *job], options.config_dir)
    began = time.process_time()
    found = rentals(problem)
    seconds = time.process_time() - began
    front = pareto_front([rental.bill for rental in found])
    return [_choice(rental, index in front, seconds) for index, rental in enumerate(found)]


def _choice(rental: Rental, on_front: bool, seconds: float) -> NodeChoice:
    cluster, plan = rental.problem.cluster, rental.plan
    ends = zip(plan.boundaries, plan.boundaries[1:], strict=False)
    return NodeChoice(
        nodes=" + ".join(f"{group.count} × {group.gpus} {group.device.name}" for group in cluster.groups),
        seconds_per_iteration=rental.iteration_time_s,
        hours=rental.bill.hours,
        dollars=rental.bill.dollars,
        on_front=on_front,
        plan=plan.describe(rental.problem.training.global_batch_size),
        node_order=order_label(cluster.arranged(plan.node_order)) or cluster.groups[0].device.name,
        layers="-".join(str(end - first) for first, end in ends),
        cpu_seconds=seconds,
    )


def report(choices: Sequence[NodeChoice], options: ParetoOptions) -> Report:
    """Return the front as a table, fastest first, and all choices as a picture."""
    front = sorted((choice for choice in choices if choice.on_front), key=lambda choice: choice.hours)
    header = ("nodes", "s/iteration", "hours", "dollars", "plan", "nodes along the pipeline")
    cells = [
        (choice.nodes, f"{choice.seconds_per_iteration:.4f}", f"{choice.hours:,.0f}",
         f"{choice.dollars:,.0f}", choice.plan, choice.node_order)
        for choice in front
    ]  # fmt: skip
    note = f"{' '.join(options.overrides)}, {options.num_iterations:,.0f} iterations."
    verdict = (
        f"{len(choices)} choices of nodes have a plan, {len(front)} are on the front; searched in one batch "
        f"in {choices[0].cpu_seconds:.1f} CPU seconds of one thread."
    )
    picture = (front_figure(choices, front), "hours against dollars of every choice of nodes")
    return Report(note, markdown_table(header, cells, (0, 4, 5)), verdict, pictures={"pareto.png": picture})


def front_figure(choices: Sequence[NodeChoice], front: Sequence[NodeChoice]) -> Figure:
    """Draw hours against dollars: every choice a dot, the front a staircase."""
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter([c.hours for c in choices], [c.dollars for c in choices], s=16, color="#9a9a9a")
    axes.plot([c.hours for c in front], [c.dollars for c in front], "o-", color="#2f5d8a",
              drawstyle="steps-post", label="front: no other is faster and cheaper")  # fmt: skip
    for choice in front:
        axes.annotate(choice.nodes, (choice.hours, choice.dollars), (6, 6), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="hours of the job", ylabel="dollars of the job")
    axes.legend(frameon=False)
    return figure


def run(options: ParetoOptions) -> int:
    """Search the offer; returns the exit status."""
    limits = "layer-wise plans, and what a provider lends on the day."
    study = Study("pareto", "Which nodes to rent?", limits, search_offer, partial(report, options=options))
    return run_study(study, {"the offer": options}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.pareto", __doc__, ParetoOptions, run))
