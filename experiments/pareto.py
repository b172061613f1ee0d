"""Which nodes to rent: hours against dollars of a job over all choices of nodes of an offer.

    python -m experiments.pareto                # FASOP's study: GPT-2 XL on up to 8 + 8 nodes
    python -m experiments.pareto publish=true   # and write the page of results

Every choice of counts is a cluster of its own; the best uniform plans of all of them are searched in one
batch (`darts_parallel.exact.many_clusters`), the order of the nodes and the stages included. Writes
`pareto.csv`, `pareto.md` and `pareto.png`. The default is the study of FASOP (HPDC'24):
GPT-2 XL, up to 8 nodes of 8 A100 and 8 of 8 A10, 12.5 million iterations. In the tests the batch is compared
with the exact uniform planner, choice by choice, on small offers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich.console import Console

from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.plan.file import write_text
from darts_parallel.planner.node_choice import Rental, node_choices, pareto_front, rentals
from darts_parallel.problem.orders import order_label
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.comparison.picture import save
from experiments.results_page import processor, publish, result_folder

BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}


@dataclass
class ParetoOptions:
    """Command line of `python -m experiments.pareto`."""

    overrides: list[str] = field(
        default_factory=lambda: [
            "model=gpt2_xl",
            "training=gpt2_xl",
            "cluster=offer_a100_a10",
            "space=uniform",
        ]
    )
    """Hydra overrides of the problem; its cluster is the offer."""
    num_iterations: float = 12.5e6
    config_dir: str | None = None
    out: str = "outputs/pareto"
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        require_at_least("num_iterations", self.num_iterations, 0, strict=True)


def study(options: ParetoOptions, console: Console) -> int:
    """Search all choices, print the front, write table and picture; returns the exit status."""
    torch.set_num_threads(1)
    job = ["objective=cost", f"objective.num_iterations={options.num_iterations}"]
    problem = load_problem([*options.overrides, *job], options.config_dir)
    began, began_cpu = time.perf_counter(), time.process_time()
    found = rentals(problem)
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    front = pareto_front([rental.bill for rental in found])
    folder = result_folder(options.out)
    names = [f"{group.device.name}_nodes" for group in problem.cluster.groups]
    header = [*names, "seconds_per_iteration", "hours", "dollars", "on_front", "plan", "node_order", "layers"]
    rows = [
        [*r.counts, r.iteration_time_s, r.bill.hours, r.bill.dollars, index in front, *_cells(r)]
        for index, r in enumerate(found)
    ]
    write_text(folder / "pareto.csv", csv_text(header, rows))
    asked = len(node_choices(problem))
    note = (
        f"{asked} choices of nodes, {len(found)} with a plan; searched in one batch in {seconds:.1f} s "
        f"({cpu:.1f} CPU seconds, one thread) on {processor()}."
    )
    text = markdown([found[i] for i in front], names, note)
    write_text(folder / "pareto.md", text)
    title = f"{problem.config.model.name}, {options.num_iterations:,.0f} iterations: {asked} choices of nodes"
    save(pareto_figure(found, front, title), folder / "pareto.png")
    if options.publish:
        publish("pareto", "Which nodes to rent?", "python -m experiments.pareto", f"{title}.\n\n{text}",
                {folder / "pareto.png": "hours against dollars of every choice of nodes"})  # fmt: skip
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"rows: {folder / 'pareto.csv'}, picture: {folder / 'pareto.png'}", soft_wrap=True, markup=False
    )
    return 0


def _cells(rental: Rental) -> list[str]:
    batch, cluster = rental.problem.training.global_batch_size, rental.problem.cluster
    order = order_label(cluster.arranged(rental.plan.node_order)) or cluster.groups[0].device.name
    layers = "-".join(
        str(b - a) for a, b in zip(rental.plan.boundaries, rental.plan.boundaries[1:], strict=False)
    )
    return [rental.plan.describe(batch), order, layers]


def markdown(front: Sequence[Rental], names: Sequence[str], note: str) -> str:
    """The front as a table, fastest first."""
    header = [*names, "s/iteration", "hours", "dollars", "plan", "nodes along the pipeline"]
    rows = [
        [*map(str, r.counts), f"{r.iteration_time_s:.4f}", f"{r.bill.hours:,.0f}", f"{r.bill.dollars:,.0f}",
         *_cells(r)[:2]]
        for r in front
    ]  # fmt: skip
    return "\n".join([*markdown_table(header, rows, (len(header) - 2, len(header) - 1)), "", note, ""])


def pareto_figure(found: Sequence[Rental], front: Sequence[int], title: str) -> Figure:
    """Hours against dollars: every choice a dot, the front a staircase (what lies above it is beaten)."""
    figure = Figure(figsize=(8.0, 5.5), layout="constrained")
    axes = figure.subplots()
    for several, colour, label in (
        (False, "#c47a3a", "nodes of one type"),
        (True, "#9a9a9a", "of several types"),
    ):
        bills = [r.bill for r in found if (sum(n > 0 for n in r.counts) > 1) == several]
        if bills:
            hours, dollars = [b.hours for b in bills], [b.dollars for b in bills]
            axes.scatter(hours, dollars, s=16, color=colour, label=label)
    best = [found[i] for i in front]
    hours, dollars = [r.bill.hours for r in best], [r.bill.dollars for r in best]
    axes.plot(hours, dollars, "o-", color="#2f5d8a", drawstyle="steps-post",
              label="front: no other is faster and cheaper")  # fmt: skip
    for rental in best:
        groups = rental.problem.cluster.groups
        label = " + ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in groups)
        axes.annotate(label, (rental.bill.hours, rental.bill.dollars), fontsize=8, xytext=(6, 6),
                      textcoords="offset points", bbox=BEHIND_TEXT)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="hours of the job", ylabel="dollars of the job", title=title)
    axes.margins(0.12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    raise SystemExit(
        run_main("experiments.pareto", __doc__, ParetoOptions, lambda options: study(options, Console()))
    )
