"""Which estimator knows what few bits cost, and how wrong are the others?

    python -m experiments.bilevel_estimators [seeds=[0,1,2,3]] [steps=150]

The truth is a training from scratch with 2-bit sums in one block or in all of them, or with 2-bit gradients:
its smoothed test loss after `steps` minus that of exact training with equal weights and batches, and how many
times as many steps it takes to the exact training's loss. Beside it, of other weights and batches:

- trials: trainings from the initial weights (what the loop uses for all blocks together), read at several
  lengths over their last fifth, nats turned into steps by the exact trial's curve; and as they were read
  before: the mean of the last half of 70 steps, by the slope there;
- switches: one block switched hard to 2 bits on validation bytes, at weights that trained on sampled plans,
  forward only (what the loop shares the trials' cost by);
- mixture, first and second order: the slope of a mixture's validation loss, at weights that trained in it;
- Gumbel: the slope at one-hot samples, at weights that trained on them;
- mixture trials: trainings of 40 steps from the mixture's weights, with 2 bits and without.

A seed that stands in the folder `out` is not run again. Writes `bilevel_estimators.csv` and, with
publish=true, `experiments/results/bilevel_estimators.md`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log
from statistics import mean, stdev

import torch
from torch import Tensor

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, load_corpus, sample
from darts_parallel.bilevel.estimators.mixture import MixedLoss, one_hot_sample, slopes
from darts_parallel.bilevel.estimators.switches import switch_losses
from darts_parallel.bilevel.estimators.trials import behind, middle_of_read, train_losses
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.measurements import MIN_POINTS, log_delay, measure
from darts_parallel.bilevel.retraining.retrain import retrain, smoothed
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.trainer import WeightTrainer, hard
from darts_parallel.bilevel.transformer import Weights, mixed_loss, plan_loss
from darts_parallel.config.checks import MAX_PROCESSES, require_at_least, require_at_most
from darts_parallel.config.options import run_main
from darts_parallel.plan.file import write_json, write_text
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.calibration.errors import spearman
from experiments.results_page import publish, result_folder

PAIRS = ((1, 16), (4, 8), (4, 4), (4, 2))
"""What a mixture mixes; the last is the one that is judged."""
EXACT, LOSSY = Candidate(1, 1), Candidate(4, 1, 2)
GRADIENTS = Candidate(1, 8, 16, 2)
MEASURED = 8
"""Validation batches that switches and slopes are averaged over."""
LATER_STEPS = 40
"""Of trials from the mixture's weights."""
STEPPED = ("all", "gradients")
"""What is judged in log steps, too."""
LENGTHS = (0.5, 0.67, 0.83, 1.0)
"""Shares of the longest trial at which trials are read."""
BEFORE = 0.58
"""The same of the trials as they were read before: 70 of 120 steps."""
Row = dict[str, float]
"""Nats by what is judged: `all`, `gradients`, or the number of a block; log steps by `all steps`."""


@dataclass
class EstimatorOptions:
    """What to run."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    steps: int = 150
    """Weight steps of a training from scratch."""
    trial_steps: int = 120
    """Of the longest trial."""
    search_steps: int = 80
    """Weight steps before mixtures, samples and switches are asked."""
    problem: list[str] = field(default_factory=list)
    """Overrides of `experiment=bilevel`."""
    processes: int = 2
    out: str = "outputs/bilevel_estimators"
    publish: bool = False

    def __post_init__(self) -> None:
        require_at_most("processes", self.processes, MAX_PROCESSES)
        for key in ("steps", "trial_steps", "search_steps", "processes"):
            require_at_least(key, getattr(self, key), 1)


def judged(blocks: int) -> dict[str, tuple[Candidate, ...]]:
    """Plans whose cost is estimated, by name."""
    plans = {"all": (LOSSY,) * blocks, "gradients": (GRADIENTS,) * blocks}
    for index in range(blocks):
        plans[str(index)] = tuple(LOSSY if i == index else EXACT for i in range(blocks))
    return plans


def truth(settings: BilevelSettings, corpus: Corpus, seed: int, jobs: Jobs) -> Row:
    """Nats that every judged plan ends above exact training, from scratch, and the log steps of some."""
    plans = judged(settings.num_blocks)
    exact = retrain((EXACT,) * settings.num_blocks, settings.global_batch_size, settings, corpus, seed, None)
    target, steps = exact.final_loss, settings.retrain_steps
    arguments = [
        (plan, settings.global_batch_size, settings, corpus, seed, target if name in STEPPED else None)
        for name, plan in plans.items()
    ]
    found = {}
    for name, run in zip(plans, jobs.map(retrain, arguments), strict=True):
        # a training that reached the target before the exact one did ends there
        end = min(steps, run.test[-1][0])
        at_end = dict(smoothed(run.test))[end]
        found[name] = at_end - dict(smoothed(exact.test))[end]
        if name in STEPPED:
            reached = run.steps_to(target)
            found[f"{name} steps"] = log((reached or run.test[-1][0]) / steps)
    return found


def trials(settings: BilevelSettings, corpus: Corpus, longest: int, seed: int, jobs: Jobs) -> dict[str, Row]:
    """Costs of short trainings from the initial weights, by how they are read."""
    plans = {"exact": (EXACT,) * settings.num_blocks} | judged(settings.num_blocks)
    arguments = [
        (settings, corpus.train, plans[name], longest, seed, settings.rounds) for name in ("exact", *STEPPED)
    ]
    exact, *others = jobs.map(train_losses, arguments)
    found: dict[str, Row] = {}
    for steps in sorted({max(round(share * longest), MIN_POINTS) for share in LENGTHS}):
        row = found.setdefault(f"trials of {steps} steps", {})
        for name, curve in zip(STEPPED, others, strict=True):
            nats = behind(curve[:steps], exact[:steps])
            row[name] = nats
            row[f"{name} steps"] = log_delay(exact[:steps], nats, middle_of_read(steps))
    before = max(round(BEFORE * longest), MIN_POINTS)
    exchange = measure(list(enumerate(exact[:before], 1)))
    rate = exchange.nats_per_efold if exchange else exact[before - 1]
    row = found.setdefault(f"trials of {before} steps, last half, by the slope", {})
    for name, curve in zip(STEPPED, others, strict=True):
        row[name] = _behind(curve[:before], exact[:before])
        row[f"{name} steps"] = max(row[name], 0.0) / rate
    return found


def _behind(curve: Sequence[float], exact: Sequence[float]) -> float:
    return mean(a - b for a, b in list(zip(curve, exact, strict=True))[len(exact) // 2 :])


class _Trained:
    """Weights that trained for some steps in a mixture, on one-hot samples, or on sampled plans."""

    def __init__(self, settings: BilevelSettings, corpus: Corpus, steps: int, seed: int, way: str) -> None:
        self.settings, self.corpus, self.seed = settings, corpus, seed
        self.generator = torch.Generator().manual_seed(seed + 11)
        self.trainer = WeightTrainer(settings, settings.global_batch_size, seed, measure_noise=False)
        self.even = torch.full((settings.num_blocks, len(PAIRS)), 1.0 / len(PAIRS))
        for _ in range(steps):
            tokens = self.trainer.next_batch(corpus.train)
            weights = self.even if way == "mixture" else one_hot_sample(self.even, self.generator)
            plan = self.drawn(weights)

            def loss(
                model: Weights, own: Tensor, weights: Tensor = weights, plan: list[Candidate] = plan
            ) -> Tensor:
                if way == "switches":
                    return plan_loss(model, own, plan)
                return mixed_loss(model, own, PAIRS, weights, "collective")

            self.trainer.learn(tokens, loss, [hard((1, 16))] * settings.num_blocks)

    def drawn(self, weights: Tensor) -> list[Candidate]:
        """The plan of one-hot weights."""
        return [Candidate(PAIRS[i][0], 1, PAIRS[i][1]) for i in weights.argmax(1).tolist()]

    def batch(self, part: str) -> Tensor:
        """Fresh tokens of one part."""
        count, context = self.settings.global_batch_size, self.settings.context
        return sample(getattr(self.corpus, part), count, context, self.generator)

    def switched(self) -> Row:
        """Hard one-layer switches around sampled plans, averaged; their sum stands for all blocks."""
        total = torch.zeros(self.settings.num_blocks, dtype=torch.float64)
        for _ in range(MEASURED):
            plan = self.drawn(one_hot_sample(self.even, self.generator))
            total += switch_losses(self.trainer.weights, self.batch("validation"), plan, PAIRS[-1:])[:, 0]
        return _row((total / MEASURED).tolist())

    def slope(self, order: str, one_hot: bool) -> Row:
        """Slopes of the validation loss in the weight of 2 bits against that of exact sums."""
        total = torch.zeros(self.settings.num_blocks)
        loss: MixedLoss = lambda model, own, weights: mixed_loss(model, own, PAIRS, weights, "collective")  # noqa: E731
        for _ in range(MEASURED):
            weights = one_hot_sample(self.even, self.generator) if one_hot else self.even
            batches = self.batch("train"), self.batch("validation")
            found = slopes(order, loss, self.trainer, weights, *batches).by_pair
            total += found[:, -1] - found[:, 0]
        return _row((total / MEASURED).tolist())

    def later_trials(self) -> Row:
        """Short trainings from here with 2 bits and without, on equal batches, over their last half."""
        state, curves = self.trainer.state(), []
        for candidate in (EXACT, LOSSY):
            plan = (candidate,) * self.settings.num_blocks
            copied = {name: weight.clone() for name, weight in state["weights"].items()}
            moments = [(m.clone(), s.clone()) for m, s in state["moments"]]
            self.trainer.restore({**state, "weights": copied, "moments": moments})

            def loss(model: Weights, own: Tensor, plan: tuple[Candidate, ...] = plan) -> Tensor:
                return plan_loss(model, own, plan)

            pairs = [hard((1, 16))] * len(plan)
            curves.append(
                [self.trainer.advance(self.corpus.train, loss, pairs).loss for _ in range(LATER_STEPS)]
            )
        return {"all": _behind(curves[1], curves[0])}


def _row(by_block: Sequence[float]) -> Row:
    return {str(index): value for index, value in enumerate(by_block)} | {"all": sum(by_block)}


def estimates_from(
    way: str, settings: BilevelSettings, corpus: Corpus, steps: int, seed: int
) -> dict[str, Row]:
    """All estimates that start from weights trained in one way."""
    trained = _Trained(settings, corpus, steps, seed, way)
    if way == "switches":
        return {"switches": trained.switched()}
    if way == "gumbel":
        return {"Gumbel slope": trained.slope("first", one_hot=True)}
    return {
        "mixture slope, first order": trained.slope("first", one_hot=False),
        "mixture slope, second order": trained.slope("second", one_hot=False),
        "trials from the mixture": trained.later_trials(),
    }


def one_seed(options: EstimatorOptions, corpus: Corpus, seed: int, jobs: Jobs) -> dict[str, Row]:
    """Truth and all estimates of one seed."""
    problem = load_problem(["experiment=bilevel", *options.problem])
    settings = replace(BilevelSettings.of(problem, seed), retrain_steps=options.steps)
    # the truth has other weights and batches than the estimates, as a retraining has
    found = {"truth": truth(settings, corpus, 100_000 + seed, jobs)}
    found |= trials(settings, corpus, options.trial_steps, seed, jobs)
    ways = [(way, settings, corpus, options.search_steps, seed) for way in ("switches", "mixture", "gumbel")]
    for part in jobs.map(estimates_from, ways):
        found |= part
    return found


def table(seeds: Sequence[dict[str, Row]]) -> str:
    """Means and standard deviations over seeds; the rank correlation of blocks with the truth's means."""
    blocks = sorted(name for name in seeds[0]["truth"] if name.isdigit())
    names = ["all", "all steps", *blocks, "gradients", "gradients steps"]
    words = ["all blocks", "log steps", *(f"block {name}" for name in blocks), "gradients", "log steps"]
    lines = []
    true = [mean(row["truth"][name] for row in seeds) for name in blocks]
    for estimator in seeds[0]:
        rows = [row[estimator] for row in seeds]
        cells = [_cell([row[name] for row in rows if name in row]) for name in names]
        known = all(name in rows[0] for name in blocks)
        rank = (
            f"{spearman([mean(row[name] for row in rows) for name in blocks], true):+.1f}" if known else "-"
        )
        lines.append([estimator, *cells, rank])
    return "\n".join(markdown_table(("estimator", *words, "order of blocks"), lines))


def sums_of_blocks(seeds: Sequence[dict[str, Row]]) -> str:
    """One sentence: what all blocks cost together, and the sum of what each costs alone."""
    blocks = [name for name in seeds[0]["truth"] if name.isdigit()]
    together = [row["truth"]["all"] for row in seeds]
    alone = [sum(row["truth"][name] for name in blocks) for row in seeds]
    return f"All blocks together cost {_cell(together)} nats; the sum of each alone is {_cell(alone)}."


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values):+.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def run(options: EstimatorOptions) -> int:
    """All seeds, the table and the files."""
    torch.set_num_threads(1)
    load_problem(["experiment=bilevel", *options.problem])  # refused before anything is left behind
    corpus, folder = load_corpus(), result_folder(options.out)
    found = []
    with Jobs(options.processes) as jobs:
        for seed in options.seeds:
            path = folder / f"seed-{seed}.json"
            if not path.exists():
                write_json(path, one_seed(options, corpus, seed, jobs))
            found.append(json.loads(path.read_text(encoding="utf-8")))
            print(f"seed {seed} done", flush=True)
    lines = [
        (seed, name, what, cost)
        for seed, rows in zip(options.seeds, found, strict=True)
        for name, row in rows.items()
        for what, cost in row.items()
    ]
    write_text(folder / "bilevel_estimators.csv", csv_text(("seed", "estimator", "judged", "cost"), lines))
    note = (
        f"Nats that 2 bits cost, mean ± standard deviation over {len(options.seeds)} seeds; trainings from "
        f"scratch of {options.steps} steps, trials of at most {options.trial_steps}, other weights after "
        f"{options.search_steps}. Log steps: logarithm of how many times as many steps, to the exact "
        "training's final loss, in at most three times as many. Order of blocks: Spearman's rank correlation "
        "with the truth."
    )
    page = f"{note}\n\n{table(found)}\n\n{sums_of_blocks(found)}\n"
    write_text(folder / "table.md", page)
    print(page)
    if options.publish:
        command = f"python -m experiments.bilevel_estimators 'seeds={options.seeds}' steps={options.steps}"
        publish("bilevel_estimators", "Which estimator knows what few bits cost?", command, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.bilevel_estimators", __doc__, EstimatorOptions, run))
