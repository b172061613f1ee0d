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
from darts_parallel.bilevel.retrain import FIRST_RETRAIN_SEED, Retrained, Training, Trainings
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.config.checks import MAX_PROCESSES, require_at_least, require_size
from darts_parallel.config.options import run_main
from darts_parallel.plan.file import write_text
from darts_parallel.problem.problem import Problem, load_problem
from darts_parallel.report.tables import markdown_table
from experiments.results_page import publish, result_folder

BITS = (16, 8, 4, 2)
LOOP = "loop's plan"
TIE = 1e-9
"""Ratios this close to 1 are ties: equal plans."""


@dataclass
class CrossoverOptions:
    """What to run."""

    bandwidths_GBps: list[float] = field(  # noqa: N815
        default_factory=lambda: [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Trainings of every plan."""
    problem: list[str] = field(default_factory=list)
    """Overrides of `experiment=bilevel`."""
    processes: int = 2
    out: str = "outputs/bilevel_crossover"
    publish: bool = False

    def __post_init__(self) -> None:
        require_size("processes", self.processes, MAX_PROCESSES)
        for value in self.bandwidths_GBps:
            require_at_least("bandwidths_GBps", value, 0, strict=True)


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


def steps_to_target(
    plans: Sequence[BilevelPlan], settings: BilevelSettings, trainings: Trainings, seeds: Sequence[int]
) -> list[list[float]]:
    """Return the steps to the target of every plan by seed, at most `retrain_factor` times 16 bits'."""
    own = [FIRST_RETRAIN_SEED + seed for seed in seeds]
    targets = [run.final_loss for run in trainings.references(own, settings)]
    wanted = [
        Training(plan.blocks, plan.global_batch_size, seed, target)
        for plan in plans
        for seed, target in zip(own, targets, strict=True)
    ]
    runs = iter(trainings.run(wanted, settings, lambda done, total: print(f"{done} of {total}", flush=True)))
    return [[_steps(next(runs), target) for target in targets] for _ in plans]


def _steps(run: Retrained, target: float) -> float:
    return run.steps_to(target) or float(run.test[-1][0])


def run(options: CrossoverOptions) -> int:
    """Search once, plan at every bandwidth, train every plan, and draw."""
    torch.set_num_threads(1)
    problem = load_problem(["experiment=bilevel", *options.problem])  # before anything is left behind
    corpus, folder = load_corpus(), result_folder(options.out)
    settings = BilevelSettings.of(problem, 0)
    with Jobs(options.processes) as jobs:
        search = BilevelSearch(settings, problem, corpus, jobs)
        search.run()
        plans = {}
        for bandwidth in options.bandwidths_GBps:
            plans[bandwidth] = plans_at(
                at_bandwidth(options, bandwidth), search.log_slowdown, settings.exact_seconds
            )
            print(f"planned at {bandwidth:g} GB/s", flush=True)
        every = [plan for own in plans.values() for plan in own.values()]
        trainings = Trainings(folder / "retrained", corpus, jobs)
        steps = iter(steps_to_target(every, settings, trainings, options.seeds))
    prices = search.log_slowdown
    points = {
        bandwidth: {
            name: Point(plan, next(steps), prices.of_plan(plan.blocks, plan.global_batch_size))
            for name, plan in own.items()
        }
        for bandwidth, own in plans.items()
    }
    text = page(options, points)
    times = {bandwidth: {n: p.times for n, p in own.items()} for bandwidth, own in points.items()}
    write_text(folder / "table.md", text)
    pictures = {draw(folder / "crossover.png", times): "Time to target against bandwidth"}
    print(text)
    if options.publish:
        command = f"python -m experiments.bilevel_crossover 'seeds={options.seeds}'"
        question = "From which bandwidth on do few bits no longer pay?"
        publish("bilevel_crossover", question, command, text, pictures)
    return 0


@dataclass(frozen=True)
class Point:
    """One plan at one bandwidth, measured steps to the target by seed, and its learned log slowdown."""

    plan: BilevelPlan
    steps: list[float]
    learned: float

    @property
    def times(self) -> list[float]:
        """Predicted seconds to the target, by seed."""
        return [self.plan.seconds * count for count in self.steps]


def ratios(own: dict[str, Point]) -> tuple[str, list[float]]:
    """Return the best of the others by mean log time, and the loop's time over its, by seed."""
    others = {name: mean(map(log, point.times)) for name, point in own.items() if name != LOOP}
    best = min(others, key=lambda name: others[name])
    return best, [a / b for a, b in zip(own[LOOP].times, own[best].times, strict=True)]


def page(options: CrossoverOptions, points: dict[float, dict[str, Point]]) -> str:
    """Tabulate mean times to target, and say where the loop's plan is not the best."""
    names = [*(f"{bits} bits" for bits in BITS), LOOP]
    header = ("GB/s", *(f"{name} (ms)" for name in names), "best other", "loop / best other", "loop's plan")
    lines, above = [], []
    for bandwidth, own in points.items():
        best, ratio = ratios(own)
        chosen = own[LOOP].plan
        cells = [
            f"{1e3 * exp(mean(map(log, own[name].times))):.1f}" if name in own else "-" for name in names
        ]
        cells += [best, f"{exp(mean(map(log, ratio))):.3f} ({min(ratio):.3f} to {max(ratio):.3f})"]
        cells += [f"{chosen.plan.describe(chosen.global_batch_size)}: {plan_words(chosen)}"]
        lines.append([f"{bandwidth:g}", *cells])
        if min(ratio) > 1.0 + TIE:
            above.append(_why(bandwidth, best, own, median(ratio)))
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
    return "\n".join([note, "", *markdown_table(header, lines), "", verdict, ""])


def plan_words(plan: BilevelPlan) -> str:
    """Write the bits of all blocks in a few words, e.g. `sums 16 16 4 4, gradients 2 2 2 2`."""
    sums = " ".join(str(block.forward_pair[1]) for block in plan.blocks)
    sent = " ".join(str(block.gradient_pair[1]) for block in plan.blocks)
    return f"sums {sums}, gradients {sent}"


def _why(bandwidth: float, best: str, own: dict[str, Point], ratio: float) -> str:
    """Compare the loop's plan with the better one in one line."""
    mine, other = own[LOOP], own[best]
    steps = mean(log(a / b) for a, b in zip(mine.steps, other.steps, strict=True))
    learned = mine.learned - other.learned
    return (
        f"- {bandwidth:g} GB/s: {best} is {100 * (ratio - 1):.1f} % faster; the loop expected "
        f"{100 * (exp(learned) - 1):+.1f} % steps against it and needs {100 * (exp(steps) - 1):+.1f} %."
    )


def draw(path: Path, times: dict[float, dict[str, list[float]]]) -> Path:
    """Draw time to target of every plan against bandwidth; return the picture's file."""
    figure = Figure(figsize=(7.0, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name in next(iter(times.values())):
        middle = [1e3 * median(own[name]) for own in times.values()]
        strong = name == LOOP
        axes.plot(list(times), middle, marker="o", label=name, linewidth=2.5 if strong else 1.2,
                  color="black" if strong else None, linestyle="--" if strong else "-")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bandwidth of a link (GB/s)")
    axes.set_ylabel("time to target (ms, predicted seconds x measured steps)")
    axes.legend()
    figure.savefig(path)
    return path


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.bilevel_crossover", __doc__, CrossoverOptions, run))
