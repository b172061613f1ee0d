"""Does it matter to the bilevel loop that the weights train?

    python -m experiments.bilevel                          batch sizes at 16 bits, 5 seeds
    python -m experiments.bilevel seeds=[0,1] 'space.grad_comm_bits=[16,8,4,2]' publish=true

Every seed runs the loop and its controls, and trains all of their plans from scratch with equal seeds:
`frozen_weights` after the warm-up, `no_weight_step` after it, `random_logits`, and `trials` (the constant
batch size that is best in short trainings from the initial weights). `long trials` are as long as the
trainings that judge. Where bits are free, `greedy` lowers them by sensitivity, until its phases are as fast
as those of the loop. Every constant batch size and uniform number of bits is trained; the best of these,
after the fact, is `best uniform`. `page=NAME` names the page.
The other arguments are those of `darts-parallel experiment=bilevel`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, isfinite, log
from statistics import mean, median

import numpy as np
import torch

from darts_parallel.bilevel import (
    REFERENCE,
    SCHEDULE,
    BatchPlan,
    BilevelLoop,
    BilevelSettings,
    Corpus,
    LogSlowdown,
    TrainingPhase,
    compared,
    judged,
    load_corpus,
    times,
)
from darts_parallel.config import guarded, read_yaml
from darts_parallel.cost import evaluate
from darts_parallel.planner import tightened
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.data import DATA
from experiments.results_page import Page, publish, typed_command

TOY: list[str] = read_yaml(DATA / "problems.yaml")["bilevel"]
"""A toy whose trainings take seconds, at 16 bits; overrides come after it."""
CONTROLS = ("frozen_weights", "no_weight_step", "random_logits")
LIMITS = (
    "other models and optimizers; the learning rate is constant; few bits and stale weights. The best "
    "uniform choice is made after the fact, by the very trainings that are compared."
)
RESAMPLES = 65_536
"""Sign patterns that the permutation test draws; samples of up to 16 are enumerated."""
Schedules = dict[str, Sequence[TrainingPhase]]
Times = Mapping[str, float]
"""Predicted seconds to the target by name; `inf` where it is not reached."""


def searched(
    overrides: Sequence[str],
    corpus: Corpus,
    control: str = "none",
    known: BilevelLoop | None = None,
) -> BilevelLoop:
    """Run the loop of a job without something that is to be controlled for.

    Args:
        known: A loop of the same seed, whose trials serve again.
    """
    job = ["experiment=bilevel", *TOY, *overrides, f"bilevel.control={control}"]
    problem = tightened(load_problem(job))
    tried = None if known is None else known.tried
    loop = BilevelLoop(BilevelSettings.of(problem), problem, corpus, tried)
    loop.run()
    return loop


def by_trials(loop: BilevelLoop, constant: Schedules, steps: int) -> Sequence[TrainingPhase]:
    """Return the constant batch size that gets first to the loss of a reference of so many steps."""
    short = replace(loop.settings, retrain_steps=steps)
    trial = BilevelLoop(short, loop.problem, loop.corpus)
    found = times(judged(trial, constant, index=1))
    del found[REFERENCE]
    return constant[min(found, key=found.__getitem__)]


def uniform_bits(loop: BilevelLoop) -> Schedules:
    """Return the best plan of every number of bits below 16 that all collectives of the blocks share."""
    given = loop.settings.global_batch_size
    schedules: Schedules = {}
    for bits in sorted(loop.prices.all_bits)[:-1]:
        plan = loop.best_plan(given, loop.space.free.at_bits(bits, bits))
        if plan is not None:
            schedules[f"bits {bits}"] = [TrainingPhase(0, plan)]
    return schedules


def greedy(loop: BilevelLoop, sensitivity: LogSlowdown, plan: BatchPlan) -> BatchPlan:
    """Lower the bits of one block at a time, the least sensitive for a saved second, from 16 bits.

    That is the rule of HAWQ-V2 (Dong et al. 2020, arXiv 1911.03852), at the degrees and stages of a plan. It
    ends when the plan is as fast as the given one, or when no move saves time.

    Args:
        sensitivity: Slopes of a validation loss at trained weights, as log slowdown.
    """
    here = plan.problem(loop.problem)

    def priced(layers: Sequence[LayerStrategy]) -> BatchPlan:
        own = replace(plan.plan, layers=tuple(layers))
        blocks = loop.space.blocks_of(own)
        seconds = evaluate(own, here).iteration_time_s
        steps = sensitivity.of_plan(blocks, plan.batch)
        return replace(plan, plan=own, blocks=blocks, seconds=seconds, log_slowdown=steps)

    whole = [replace(layer, tp_comm_bits=16, grad_comm_bits=16) for layer in plan.plan.layers]
    best = priced(whole)
    while best.seconds > plan.seconds:
        moves = [priced(layers) for layers in lowered(loop, best.plan)]
        faster = [own for own in moves if own.seconds < best.seconds]
        if not faster:
            break
        before = best
        best = min(
            faster,
            key=lambda own: (
                (own.log_slowdown - before.log_slowdown) / (before.seconds - own.seconds)
            ),
        )
    return best


def lowered(loop: BilevelLoop, plan: Plan) -> Iterator[list[LayerStrategy]]:
    """Yield the layers with fewer bits of one block's sums, or of its gradients."""
    for index in range(1, loop.space.num_blocks + 1):
        for key in ("tp_comm_bits", "grad_comm_bits"):
            layer = plan.layers[index]
            for bits in loop.problem.config.space.pinned(key) or ():
                if bits < getattr(layer, key):
                    layers = [*plan.layers]
                    layers[index] = replace(layer, **{key: bits})
                    yield layers


def words(phases: Sequence[TrainingPhase]) -> str:
    """Name the phases of a training in short."""
    parts = [f"{phase.plan.batch} from {phase.from_step}" for phase in phases]
    return f"{', '.join(parts)}; last: {phases[-1].plan.describe()}"


def run_seed(
    overrides: Sequence[str], seed: int, corpus: Corpus
) -> tuple[Times, Mapping[str, str]]:
    """Search and train everything of one seed; return the times, and what was trained, by name."""
    own = [*overrides, f"search.seed={seed}"]
    loop = searched(own, corpus)
    schedules = compared(loop, loop.phases())
    constant = {name: phases for name, phases in schedules.items() if name != SCHEDULE}
    for control in CONTROLS:
        schedules[control] = searched(own, corpus, control, loop).phases()
    if len(loop.prices.by_batch) > 1:
        schedules["trials"] = by_trials(loop, constant, loop.settings.trial_steps)
        schedules["long trials"] = by_trials(loop, constant, loop.settings.retrain_steps)
    bits = uniform_bits(loop)
    if bits:
        sensitivity = searched([*own, "bilevel.estimator=mixture"], corpus).prices
        schedules["greedy"] = [
            replace(phase, plan=greedy(loop, sensitivity, phase.plan))
            for phase in schedules[SCHEDULE]
        ]
    found = dict(times(judged(loop, schedules | bits)))
    found["best uniform"] = min(found[name] for name in (*constant, *bits))
    return found, {name: words(phases) for name, phases in schedules.items()}


def plan_lines(seeds: Sequence[str], plans: Sequence[Mapping[str, str]]) -> str:
    """List what was trained, by name; seeds with equal plans share a line."""
    lines = []
    for name in plans[0]:
        same: dict[str, list[str]] = {}
        for seed, own in zip(seeds, plans, strict=True):
            same.setdefault(own[name], []).append(seed)
        for text, equal in same.items():
            which = "all seeds" if len(same) == 1 else f"seed {', '.join(equal)}"
            lines.append(f"- {name}, {which}: {text}")
    return "\n".join(lines)


def paired(runs: Sequence[Times]) -> str:
    """Compare every training with that of the found plan: seconds, ratio with its interval, wins and p.

    The interval is Student's, of the mean log ratio; p is that of a mean log ratio of 0 under exchangeable
    signs, two-sided (Fisher 1935). A target that was not reached counts as reached at the largest ratio.
    """
    lines = []
    for name in runs[0]:
        seconds = [run[name] for run in runs]
        logs = [log(run[name] / run[SCHEDULE]) for run in runs]
        reached = [own for own in logs if isfinite(own)]
        logs = [own if isfinite(own) else max(reached, default=0.0) for own in logs]
        later = sum(own > log(1.02) for own in logs)
        low, high = interval(logs)
        ratio = f"{exp(mean(logs)):.3f} ({exp(low):.3f} to {exp(high):.3f})"
        counts = f"{later} of {len(logs)}"
        count = f"{len(reached)} of {len(logs)}"
        row = [name, f"{median(seconds):.3f}", ratio, counts, count, f"{p_of_signs(logs):.3f}"]
        lines.append(row)
    header = [
        "training",
        "median predicted time to target (s)",
        "time over found (95 %)",
        "2 % later in",
        "reached",
        "p",
    ]
    return "\n".join(markdown_table(header, lines))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean; the mean alone where all values are equal."""
    from scipy.stats import sem, t

    error = float(sem(values)) if len(values) > 1 else 0.0
    half = error * float(t.ppf(0.975, max(len(values) - 1, 1)))
    return mean(values) - half, mean(values) + half


def p_of_signs(logs: Sequence[float]) -> float:
    """Test whether the mean is 0 under exchangeable signs; one value proves nothing."""
    from scipy.stats import permutation_test

    if len(logs) < 2 or not any(logs):
        return 1.0
    given = {"permutation_type": "samples", "rng": 0}
    test = permutation_test((np.array(logs),), np.mean, n_resamples=RESAMPLES, **given)
    return float(test.pvalue)


def main(arguments: list[str]) -> int:
    """Run the seeds and report; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    torch.set_num_threads(1)
    own = {"seeds": "0,1,2,3,4", "publish": "false", "page": "bilevel"}
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in own:
            own[key] = value.strip("[]")
        else:
            overrides.append(argument)
    corpus = load_corpus()
    runs = []
    plans = []
    seeds = own["seeds"].replace(" ", "").split(",")
    for seed in seeds:
        found, trained = run_seed(overrides, int(seed), corpus)
        runs.append(found)
        plans.append(trained)
        print(paired(runs), flush=True)
    text = f"{paired(runs)}\n\n{plan_lines(seeds, plans)}"
    print(text)
    if own["publish"] == "true":
        question = "Does it matter to the bilevel loop that the weights train?"
        publish(
            Page(own["page"], question, typed_command("experiments.bilevel"), text, limits=LIMITS)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded("experiments.bilevel", lambda: main(sys.argv[1:])))
