"""From which bandwidth on do few bits no longer pay, and is the loop's plan the best everywhere?

    python -m experiments.bilevel_crossover [bandwidths_GBps=[0.1,0.5,2,8,32]] [seeds=[0,1,2]]

One bilevel search prices the bits in steps; its prices depend on no network. For every bandwidth of the links
the fastest plans with 16, 8, 4 and 2 bits everywhere, and the optimum of the learned objective, are found
exactly, and all are trained from scratch on other seeds until they reach the test loss of 16 bits. Time to
target is measured steps times predicted seconds. Writes a table and a picture; what was trained in the
folder `out` is not run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import mean, median

import torch
from matplotlib.figure import Figure

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.conclusion import BilevelPlan, fixed_bits_optimum
from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import JointSpace
from darts_parallel.bilevel.learned_optimum import learned_optimum
from darts_parallel.bilevel.log_slowdown import LogSlowdown
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.retrain import FIRST_RETRAIN_SEED, Training, Trainings
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import markdown_table
from experiments.study import Report, Study, StudyOptions, run_study

NAME = "bilevel_crossover"
BITS = (16, 8, 4, 2)
LOOP = "loop's plan"
TIE = 1e-9
"""Ratios this close to 1 are ties: equal plans."""


@dataclass
class CrossoverOptions(StudyOptions):
    """Bandwidths, and the trainings of every plan."""

    bandwidths_GBps: list[float] = field(  # noqa: N815
        default_factory=lambda: [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Trainings of every plan."""
    problem: list[str] = field(default_factory=list)
    """Overrides of `experiment=bilevel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.bandwidths_GBps:
            require_at_least("bandwidths_GBps", value, 0, strict=True)


@dataclass(frozen=True)
class CrossoverPoint:
    """One training of one plan at one bandwidth."""

    bandwidth_GBps: float  # noqa: N815
    name: str
    """`16 bits`, …, or `LOOP`."""
    plan: str
    seconds_per_step: float
    """Predicted."""
    seed: int
    steps: float
    """Measured steps to the target."""
    log_slowdown: float
    """Learned."""

    @property
    def time_s(self) -> float:
        """Predicted seconds to the target."""
        return self.seconds_per_step * self.steps


def at_bandwidth(options: CrossoverOptions, bandwidth: float) -> Problem:
    """Compose the problem with links of a bandwidth in GB/s."""
    links = (
        f"cluster.nodes.0.intra_node.bandwidth_GBps={bandwidth}",
        f"cluster.inter_node.bandwidth_GBps={bandwidth}",
    )
    return load_problem(["experiment=bilevel", *options.problem, *links])


def plans_at(problem: Problem, prices: LogSlowdown, budget: float) -> dict[str, BilevelPlan]:
    """Return the plans that are compared at one bandwidth, by name."""
    batch = problem.training.global_batch_size
    space = JointSpace.build(problem, [batch])
    found: dict[str, BilevelPlan | None] = {}
    for bits in BITS:
        blocks = (Candidate(1, 1, bits, bits),) * space.num_blocks
        found[f"{bits} bits"] = fixed_bits_optimum(space, blocks, batch, budget)
    best = learned_optimum(space, prices, budget).plan
    found[LOOP] = None if best is None else BilevelPlan.of(space, best)
    return {name: plan for name, plan in found.items() if plan is not None}


def solve(options: CrossoverOptions) -> list[CrossoverPoint]:
    """Search once, plan at every bandwidth, and train every plan to the target of its seed.

    A plan takes at most `retrain_factor` times the steps of 16 bits.
    """
    torch.set_num_threads(1)
    problem, folder = load_problem(["experiment=bilevel", *options.problem]), options.out or f"outputs/{NAME}"
    settings, corpus = BilevelSettings.of(problem, 0), load_corpus()
    with Jobs(options.jobs) as jobs:
        search = BilevelSearch(settings, problem, corpus, jobs)
        search.run()
        prices = search.log_slowdown
        plans = [
            (bandwidth, name, plan)
            for bandwidth in options.bandwidths_GBps
            for name, plan in plans_at(
                at_bandwidth(options, bandwidth), prices, settings.exact_seconds
            ).items()
        ]
        trainings = Trainings(Path(folder) / "retrained", corpus, jobs)
        seeds = [FIRST_RETRAIN_SEED + seed for seed in options.seeds]
        targets = [run.final_loss for run in trainings.references(seeds, settings)]
        rounds = [(*place, *goal) for place in plans for goal in zip(seeds, targets, strict=True)]
        wanted = [
            Training(plan.blocks, plan.global_batch_size, seed, target) for *_, plan, seed, target in rounds
        ]
        runs = trainings.run(wanted, settings, lambda done, total: print(f"{done} of {total}", flush=True))
    return [
        CrossoverPoint(
            bandwidth,
            name,
            f"{plan.plan.describe(plan.global_batch_size)}: {plan_words(plan)}",
            plan.seconds,
            seed,
            run.steps_to(target) or float(run.test[-1][0]),
            prices.of_plan(plan.blocks, plan.global_batch_size),
        )
        for (bandwidth, name, plan, seed, target), run in zip(rounds, runs, strict=True)
    ]


Curves = dict[str, list[CrossoverPoint]]
"""Trainings by the plan's name, in the order of the seeds."""


def log_time(points: Sequence[CrossoverPoint]) -> float:
    """Return the mean log seconds to the target."""
    return mean(log(point.time_s) for point in points)


def report(points: Sequence[CrossoverPoint], options: CrossoverOptions) -> Report:
    """Tabulate mean times to target, draw them, and say where the loop's plan is not the best."""
    by_bandwidth: dict[float, Curves] = {}
    for point in points:
        by_bandwidth.setdefault(point.bandwidth_GBps, {}).setdefault(point.name, []).append(point)
    names = [*(f"{bits} bits" for bits in BITS), LOOP]
    header = ("GB/s", *(f"{name} (ms)" for name in names), "best other", "loop / best other", "loop's plan")
    lines, above = [], []
    for bandwidth, own in by_bandwidth.items():
        best = min((name for name in own if name != LOOP), key=lambda name: log_time(own[name]))
        ratio = [a.time_s / b.time_s for a, b in zip(own[LOOP], own[best], strict=True)]
        cells = [f"{1e3 * exp(log_time(own[name])):.1f}" if name in own else "-" for name in names]
        cells += [best, f"{exp(mean(map(log, ratio))):.3f} ({min(ratio):.3f} to {max(ratio):.3f})"]
        lines.append([f"{bandwidth:g}", *cells, own[LOOP][0].plan])
        if min(ratio) > 1.0 + TIE:
            above.append(_why(best, own, median(ratio)))
    note = (
        f"Geometric means of {len(options.seeds)} trainings a plan; in brackets the smallest and largest "
        "ratio on equal weights and batches. Time to target is predicted seconds a step times measured steps."
    )
    verdict = (
        "The loop's plan is on the lower envelope at every bandwidth: nowhere do all seeds say that another "
        "plan is faster."
        if not above
        else "The loop's plan is above the lower envelope on every seed at:\n\n" + "\n".join(above)
    )
    picture = (figure_of(by_bandwidth), "Time to target against bandwidth")
    return Report(note, markdown_table(header, lines), verdict, pictures={"crossover.png": picture})


def plan_words(plan: BilevelPlan) -> str:
    """Write the bits of all blocks in a few words, e.g. `sums 16 16 4 4, gradients 2 2 2 2`."""
    sums = " ".join(str(block.forward_pair[1]) for block in plan.blocks)
    sent = " ".join(str(block.gradient_pair[1]) for block in plan.blocks)
    return f"sums {sums}, gradients {sent}"


def _why(best: str, own: Curves, ratio: float) -> str:
    """Compare the loop's plan with the better one in one line."""
    mine, other = own[LOOP], own[best]
    steps = mean(log(a.steps / b.steps) for a, b in zip(mine, other, strict=True))
    learned = mine[0].log_slowdown - other[0].log_slowdown
    return (
        f"- {mine[0].bandwidth_GBps:g} GB/s: {best} is {100 * (ratio - 1):.1f} % faster; the loop expected "
        f"{100 * (exp(learned) - 1):+.1f} % steps against it and needs {100 * (exp(steps) - 1):+.1f} %."
    )


def figure_of(by_bandwidth: dict[float, Curves]) -> Figure:
    """Draw median time to target of every plan against bandwidth."""
    figure = Figure(figsize=(7.0, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name in next(iter(by_bandwidth.values())):
        middle = [1e3 * median(point.time_s for point in own[name]) for own in by_bandwidth.values()]
        strong = name == LOOP
        axes.plot(list(by_bandwidth), middle, marker="o", label=name, linewidth=2.5 if strong else 1.2,
                  color="black" if strong else None, linestyle="--" if strong else "-")  # fmt: skip
    label = "time to target (ms, predicted seconds x measured steps)"
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of a link (GB/s)", ylabel=label)
    axes.legend()
    return figure


def run(options: CrossoverOptions) -> int:
    """Compare all plans at all bandwidths; return the exit status."""
    load_problem(["experiment=bilevel", *options.problem])  # refused before anything is left behind
    question, limits = (
        "From which bandwidth on do few bits no longer pay?",
        "networks and models of real size.",
    )
    study = Study(NAME, question, limits, solve, partial(report, options=options))
    return run_study(study, {"all bandwidths": options}, options)


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.bilevel_crossover", __doc__, CrossoverOptions, run))
