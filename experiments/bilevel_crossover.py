"""From which bandwidth on do few bits no longer pay, and is the loop's plan the best everywhere?

    python -m experiments.bilevel_crossover [bandwidths_GBps=[0.1,0.5,2,8,32]] [seeds=[0]]

One bilevel search prices the bits in steps; its prices depend on no network. For every bandwidth of the links
the fastest plans with 16, 8, 4 and 2 bits everywhere, and the optimum of the learned objective, are found
exactly, and all are trained from scratch on other seeds until they reach the test loss of 16 bits. Time to
target is measured steps times predicted seconds. Writes a table, a picture, and TensorBoard curves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import matplotlib
import torch

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.loop import BilevelSearch
from darts_parallel.bilevel.retrain import FIRST_RETRAIN_SEED, Retrained, retrain
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.upper.found import BilevelPlan, fixed_bits_optimum
from darts_parallel.bilevel.upper.joint_space import JointSpace
from darts_parallel.bilevel.upper.learned_optimum import learned_optimum
from darts_parallel.bilevel.upper.log_steps import LogSteps
from darts_parallel.config.checks import require_at_least
from darts_parallel.plan.file import write_text
from darts_parallel.problem.problem import Problem, load_problem
from experiments.options import run_main
from experiments.results_page import publish

BITS = (16, 8, 4, 2)
LOOP = "loop's plan"
Felt = tuple[Candidate, ...]


@dataclass
class CrossoverOptions:
    """What to run."""

    bandwidths_GBps: list[float] = field(  # noqa: N815
        default_factory=lambda: [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    """Trainings of every plan."""
    problem: list[str] = field(default_factory=list)
    """Overrides of `experiment=bilevel`."""
    processes: int = 2
    out: str = "outputs/bilevel_crossover"
    publish: bool = False

    def __post_init__(self) -> None:
        require_at_least("processes", self.processes, 1)
        for value in self.bandwidths_GBps:
            require_at_least("bandwidths_GBps", value, 0, strict=True)


def at_bandwidth(options: CrossoverOptions, bandwidth: float) -> Problem:
    """The problem with links of a bandwidth in GB/s."""
    links = (
        f"cluster.nodes.0.intra_node.bandwidth_GBps={bandwidth}",
        f"cluster.inter_node.bandwidth_GBps={bandwidth}",
    )
    return load_problem(["experiment=bilevel", *options.problem, *links])


def plans_at(problem: Problem, prices: LogSteps, budget: float) -> dict[str, BilevelPlan]:
    """The plans that are compared at one bandwidth, by name."""
    batch = problem.training.global_batch_size
    space = JointSpace.build(problem, [batch])
    found: dict[str, BilevelPlan | None] = {}
    for bits in BITS:
        blocks = (Candidate(1, 1, bits, bits),) * space.num_blocks
        found[f"{bits} bits"] = fixed_bits_optimum(space, blocks, batch, budget)
    best = learned_optimum(space, prices, budget).plan
    found[LOOP] = None if best is None else BilevelPlan.of(space, best)
    return {name: plan for name, plan in found.items() if plan is not None}


def trainings(
    plans: Sequence[BilevelPlan], settings: BilevelSettings, corpus: Corpus, seeds: Sequence[int], jobs: Jobs
) -> dict[tuple[tuple[str, ...], int], tuple[float, bool]]:
    """Steps to the target of every plan and seed, and whether it was reached; equal trainings run once."""
    felt: dict[tuple[str, ...], Felt] = {
        tuple(candidate.felt() for candidate in plan.blocks): plan.blocks for plan in plans
    }
    batch = settings.global_batch_size
    exact = (Candidate(1, 1),) * settings.num_blocks
    own = [FIRST_RETRAIN_SEED + seed for seed in seeds]
    references = jobs.map(retrain, [(exact, batch, settings, corpus, seed, None) for seed in own])
    targets = dict(zip(own, (run.final_loss for run in references), strict=True))
    keys = [(words, seed) for words in felt for seed in own]
    arguments = [(felt[words], batch, settings, corpus, seed, targets[seed]) for words, seed in keys]
    runs: list[Retrained] = jobs.map(
        retrain, arguments, lambda done, _: print(f"{done} of {len(keys)}", flush=True)
    )
    steps = {}
    for (words, seed), run in zip(keys, runs, strict=True):
        reached = run.steps_to(targets[seed])
        steps[words, seed - FIRST_RETRAIN_SEED] = (reached or float(run.test[-1][0]), reached is not None)
    return steps


def run(options: CrossoverOptions) -> int:
    """Search once, plan at every bandwidth, train every plan, and draw."""
    torch.set_num_threads(1)
    corpus, folder = load_corpus(), Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    problem = load_problem(["experiment=bilevel", *options.problem])
    settings = BilevelSettings.of(problem, 0)
    with Jobs(options.processes) as jobs:
        search = BilevelSearch(settings, problem, corpus, jobs)
        search.run()
        plans = {
            bandwidth: plans_at(at_bandwidth(options, bandwidth), search.log_steps, settings.exact_seconds)
            for bandwidth in options.bandwidths_GBps
        }
        steps = trainings(
            [plan for own in plans.values() for plan in own.values()], settings, corpus, options.seeds, jobs
        )
    times = {
        bandwidth: {name: _times(plan, steps, options.seeds) for name, plan in own.items()}
        for bandwidth, own in plans.items()
    }
    text = table(options, plans, times)
    write_text(folder / "table.md", text)
    pictures = {draw(folder / "crossover.png", times): "Time to target against bandwidth"}
    _tensorboard(folder / "tensorboard", times)
    print(text)
    if options.publish:
        command = f"python -m experiments.bilevel_crossover 'seeds={options.seeds}'"
        question = "From which bandwidth on do few bits no longer pay?"
        publish("bilevel_crossover", question, command, text, pictures)
    return 0


def _times(
    plan: BilevelPlan, steps: dict[tuple[tuple[str, ...], int], tuple[float, bool]], seeds: Sequence[int]
) -> list[float]:
    words = tuple(candidate.felt() for candidate in plan.blocks)
    return [plan.seconds * steps[words, seed][0] for seed in seeds]


def table(
    options: CrossoverOptions,
    plans: dict[float, dict[str, BilevelPlan]],
    times: dict[float, dict[str, list[float]]],
) -> str:
    """Median times to target, and how far the loop's plan is above the best of the others."""
    names = [*(f"{bits} bits" for bits in BITS), LOOP]
    header = ("GB/s", *(f"{name} (ms)" for name in names), "loop / best other", "loop's plan")
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for bandwidth, own in times.items():
        middle = {name: median(values) for name, values in own.items()}
        best = min(value for name, value in middle.items() if name != LOOP)
        chosen = plans[bandwidth][LOOP]
        words = f"{chosen.plan.describe(chosen.global_batch_size)}"
        cells = [f"{1e3 * middle[name]:.1f}" for name in names]
        lines.append(
            "| " + " | ".join([f"{bandwidth:g}", *cells, f"{middle[LOOP] / best:.3f}", words]) + " |"
        )
    return f"Medians of {len(options.seeds)} trainings a plan.\n\n" + "\n".join(lines) + "\n"


def draw(path: Path, times: dict[float, dict[str, list[float]]]) -> Path:
    """Time to target of every plan against bandwidth; returns the picture's file."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.5), dpi=120)
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
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _tensorboard(folder: Path, times: dict[float, dict[str, list[float]]]) -> None:
    """One curve a plan; the step is the bandwidth in MB/s, since steps are whole numbers."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder))
    names = list(next(iter(times.values())))
    writer.add_custom_scalars(
        {"crossover": {"time to target (s) against MB/s": ["Multiline", ["crossover/.*"]]}}
    )
    for bandwidth, own in times.items():
        for name in names:
            tag = name.replace(" ", "_").replace("'", "")
            writer.add_scalar(f"crossover/{tag}", median(own[name]), round(1000 * bandwidth))
    writer.close()


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.bilevel_crossover", __doc__, CrossoverOptions, run))
