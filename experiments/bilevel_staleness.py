"""How much accuracy does a pipeline that does not wait cost, what restores it, and when does it pay?

    python -m experiments.bilevel_staleness [seeds=[0,1]] [steps=150]

The toy Transformer is trained from scratch in every way, with equal weights and test bytes: synchronously,
as an asynchronous 1F1B pipeline with stashed weights (PipeDream), with two buffers, with predicted weights,
with discounted learning rates, and as local SGD. The cost is in steps: after how many steps synchronous
training had the test loss that a way ends with. Seconds of an asynchronous step are those of the fastest
synchronous plan of the same pipeline degree without its bubble; time to target is their product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp
from pathlib import Path
from statistics import mean

import torch

from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.measurements import measure
from darts_parallel.bilevel.retraining.asynchronous import (
    Staleness,
    double_buffered,
    pipedream,
    train_local,
    train_stale,
)
from darts_parallel.bilevel.retraining.retrain import Retrained
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.config.checks import MAX_PROCESSES, require_at_least, require_at_most
from darts_parallel.config.options import run_main
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.exact.layerwise import find_plan
from darts_parallel.plan.file import write_json, write_text
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import markdown_table
from experiments.results_page import publish, result_folder

REPLICAS = 4
EXACT_BITS = ["space.tp_comm_bits=16", "space.grad_comm_bits=16"]


@dataclass
class StalenessOptions:
    """What to run."""

    seeds: list[int] = field(default_factory=lambda: [0, 1])
    steps: int = 150
    problem: list[str] = field(default_factory=list)
    """Overrides of `experiment=bilevel`."""
    processes: int = 2
    out: str = "outputs/bilevel_staleness"
    publish: bool = False

    def __post_init__(self) -> None:
        require_at_most("processes", self.processes, MAX_PROCESSES)
        for key in ("steps", "processes"):
            require_at_least(key, getattr(self, key), 1)


def train_way(name: str, settings: BilevelSettings, corpus: Corpus, seed: int, steps: int) -> Retrained:
    """One training from scratch in the way of this name."""
    if name in STALE:
        return train_stale(settings, corpus, STALE[name](settings.num_blocks), seed, steps)
    return train_local(settings, corpus, REPLICAS, int(name.rpartition(" ")[2]), seed, steps)


STALE: dict[str, Callable[[int], Staleness]] = {
    "synchronous": partial(pipedream, 1),
    "stashed, pp 2": partial(pipedream, 2),
    "stashed, pp 2, predicted": partial(pipedream, 2, predicted=True),
    "stashed, pp 4": partial(pipedream, 4),
    "stashed, pp 4, predicted": partial(pipedream, 4, predicted=True),
    "stashed, pp 4, discounted": partial(pipedream, 4, discounted=0.5),
    "two buffers": double_buffered,
    "two buffers, predicted": partial(double_buffered, predicted=True),
}
"""Versions of the weights that each block sees, by the number of blocks."""
WAYS = (*STALE, *(f"local SGD, every {every}" for every in (1, 4, 16)))


def seconds_of(problem: Sequence[str]) -> dict[int, tuple[float, float]]:
    """Seconds of the fastest synchronous plan of every pipeline degree, with its bubble and without."""
    found = {}
    for pp in (1, 2, 4):
        one = load_problem(["experiment=bilevel", *problem, *EXACT_BITS, f"space.pp={pp}"])
        plan = find_plan(one, budget=30.0).plan
        if plan is not None:
            cost = evaluate(plan, one)
            whole = cost.iteration_time_s
            found[pp] = (whole, whole - cost.breakdown_s["pipeline_bubble"])
    return found


def local_seconds(problem: Sequence[str]) -> tuple[float, float] | None:
    """Seconds of the fastest plan of as many replicas as local SGD has, and of its gradients alone."""
    one = load_problem(["experiment=bilevel", *problem, *EXACT_BITS, "space.pp=1", f"space.dp={REPLICAS}"])
    plan = find_plan(one, budget=30.0).plan
    if plan is None:
        return None
    cost = evaluate(plan, one)
    return cost.iteration_time_s, cost.breakdown_s["gradient_sync"]


def log_steps(curve: Retrained, reference: Retrained) -> float | None:
    """Log of how many times the reference's steps a way needs, by the reference's own exchange rate."""
    exchange = measure(reference.test)
    if exchange is None:
        return None
    return (curve.final_loss - reference.final_loss) / exchange.nats_per_efold


def table(options: StalenessOptions, runs: dict[tuple[str, int], Retrained]) -> str:
    """Losses, steps, and time to target against synchronous training of the best pipeline degree."""
    seconds = seconds_of(options.problem)
    best = min(whole for whole, _ in seconds.values())
    local = local_seconds(options.problem)
    header = (
        "way",
        "test loss, difference (nats)",
        "steps, ratio",
        "predicted ms/step",
        "time to target, ratio",
    )
    lines = []
    for way in WAYS:
        pairs = [(runs[way, seed], runs["synchronous", seed]) for seed in options.seeds]
        gaps = [own.final_loss - other.final_loss for own, other in pairs]
        costs = [cost for own, other in pairs if (cost := log_steps(own, other)) is not None]
        ratio = exp(mean(costs)) if costs else float("nan")
        pp = int(way.partition("pp ")[2].partition(",")[0] or 0)
        per_step = {"synchronous": best}.get(way) or (seconds[pp][1] if pp in seconds else None)
        if way.startswith("two buffers") and 4 in seconds:
            per_step = seconds[4][1]
        if way.startswith("local") and local is not None:
            per_step = local[0] - (1.0 - 1.0 / int(way.rpartition(" ")[2])) * local[1]
        time = f"{ratio * per_step / best:.3f}" if per_step else "-"
        spread = f"{mean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})"
        shown = f"{1e3 * per_step:.3f}" if per_step else "-"
        lines.append((way, spread, f"{ratio:.3f}", shown, time))
    degrees = ", ".join(
        f"pp {pp} {1e3 * whole:.3f} ({1e3 * busy:.3f} without bubble)"
        for pp, (whole, busy) in seconds.items()
    )
    note = (
        f"{len(options.seeds)} seeds, {options.steps} steps, 16 bits, slow network. Fastest synchronous plan "
        f"by pipeline degree, ms/step: {degrees}. Two buffers are priced at pp 4; local SGD as the fastest "
        f"plan of pp 1 and dp {REPLICAS} that synchronises gradients every so many steps."
    )
    return "\n".join([note, "", *markdown_table(header, lines), ""])


def _path(folder: Path, way: str, seed: int) -> Path:
    """File of one training, so that a run that is stopped goes on where it was."""
    return folder / f"{way.replace(' ', '_').replace(',', '')}-{seed}.json"


def run(options: StalenessOptions) -> int:
    """All ways and seeds."""
    torch.set_num_threads(1)
    problem = load_problem(["experiment=bilevel", *options.problem])  # before anything is left behind
    corpus, folder = load_corpus(), result_folder(options.out)
    keys = [(way, seed) for seed in options.seeds for way in WAYS]
    settings = replace(BilevelSettings.of(problem, 0), retrain_steps=options.steps)
    done = {key: Retrained.read(path) for key in keys if (path := _path(folder, *key)).exists()}
    left = [key for key in keys if key not in done]
    arguments = [(way, settings, corpus, 100_000 + seed, options.steps) for way, seed in left]

    def on_done(number: int, curves: Retrained) -> None:
        write_json(_path(folder, *left[number - 1]), {"training": curves.training, "test": curves.test})
        print(f"{len(done) + number} of {len(keys)}", flush=True)

    with Jobs(options.processes) as jobs:
        found = done | dict(zip(left, jobs.map(train_way, arguments, on_done), strict=True))
    text = table(options, found)
    write_text(folder / "table.md", text)
    print(text)
    if options.publish:
        command = f"python -m experiments.bilevel_staleness 'seeds={options.seeds}' steps={options.steps}"
        publish("bilevel_staleness", "What does a pipeline that does not wait cost?", command, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.bilevel_staleness", __doc__, StalenessOptions, run))
