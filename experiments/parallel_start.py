"""What do many random starts of the weights bring at equal compute?

    python -m experiments.parallel_start [seeds=[0,1]] [starts=8] [evaluations=480]

Every arm may compute as many gradients of one batch as the others, counted over all of its starts:

- single: one start, trained all the time;
- filtered: several starts side by side until the first steep drop of the loss is over; then copies of those
  of low loss and large gradient, with noise, replace the others; after as many steps again the best goes on
  alone;
- best_after_drop: the same without copies: at the drop the start of least loss goes on alone;
- best_at_once: the start of least loss after one step goes on alone, which the drop has not sorted yet.

Prints medians and the paired differences to `single`, and writes `parallel_start.csv`. The logits' side of
the idea stands in the ablation (`plain_restarts`, `resampled`, `resampled_early` of `experiments.ablate`).
"""

from dataclasses import dataclass, field
from statistics import median

import torch

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, load_corpus, sample
from darts_parallel.bilevel.parallel_start import ParallelStarts
from darts_parallel.bilevel.report import spread
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.plan.file import write_text
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.results_page import publish, result_folder

METHOD = """Every arm computes as many gradients of one batch; medians over the seeds, differences paired
by seed. `filtered`: several starts until the first steep drop, copies with noise of the good ones in
place of the others, then the best alone; `best_after_drop`: without copies; `best_at_once`: the start of
least loss after one step. A positive difference is a loss against the single start, which has trained
further."""

ARMS = ("single", "filtered", "best_after_drop", "best_at_once")
SIZES = ["model.num_layers=2", "model.hidden_size=64", "training.seq_len=32"]


@dataclass
class StartOptions:
    """What to run."""

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    starts: int = 4
    """Trainings side by side."""
    evaluations: int = 800
    """Gradients of one batch that an arm may compute."""
    problem: list[str] = field(default_factory=lambda: list(SIZES))
    """Overrides of `experiment=bilevel`."""
    out: str = "outputs/parallel_start"
    publish: bool = False
    """Write experiments/results, too."""

    def __post_init__(self) -> None:
        for key in ("starts", "evaluations"):
            require_at_least(key, getattr(self, key), 2)


def final_loss(
    arm: str, settings: BilevelSettings, corpus: Corpus, options: StartOptions
) -> tuple[float, int]:
    """Validation loss of one arm when its evaluations are spent, nats, and the step of its choice.

    Args:
        arm: One of `ARMS`.
        settings: Sizes, learning rate and seed.
        corpus: Bytes.
        options: Starts and evaluations.
    """
    plan = (Candidate(1, settings.num_devices),) * settings.num_blocks
    count = 1 if arm == "single" else options.starts
    starts, chosen = ParallelStarts.initial(settings, plan, count, settings.seed), 0
    spent = 0
    while spent < options.evaluations:
        starts.advance(corpus.train)
        spent += len(starts.losses)
        if len(starts.losses) == 1:
            continue
        over = arm == "best_at_once" or starts.over_the_drop(corpus.train)
        if arm == "filtered":
            starts.filter(corpus.train, max(count // 2, 1))
            over = starts.filtered_at is not None and starts.step >= 2 * starts.filtered_at
        if over:
            starts.keep_best()
            chosen = starts.step
    generator = torch.Generator().manual_seed(settings.seed + 7)
    held_out = sample(corpus.validation, 256, settings.context, generator)
    return float(starts.evaluate(held_out).min()), chosen


def run(options: StartOptions) -> int:
    """All arms and seeds."""
    torch.set_num_threads(1)
    problem, corpus = load_problem(["experiment=bilevel", *options.problem]), load_corpus()
    rows: list[dict[str, float | str]] = []
    for seed in options.seeds:
        for arm in ARMS:
            loss, chosen = final_loss(arm, BilevelSettings.of(problem, seed), corpus, options)
            rows.append({"arm": arm, "seed": seed, "validation_loss": loss, "chosen_at_step": chosen})
            print(f"seed {seed} {arm}: {loss:.4f} nats, chosen at step {chosen}", flush=True)
    folder = result_folder(options.out)
    write_text(folder / "parallel_start.csv", csv_text(list(rows[0]), [list(row.values()) for row in rows]))
    table = summary(rows, len(options.seeds))
    print(table)
    if options.publish:
        question = "Do many starts of the weights help the bilevel search?"
        method = f"{len(options.seeds)} seeds, {options.evaluations} gradients an arm. {METHOD}"
        publish("parallel_start", question, "python -m experiments.parallel_start", f"{method}\n\n{table}")
    return 0


def summary(rows: list[dict[str, float | str]], seeds: int) -> str:
    """A row for each arm: median loss, and how it stands to `single` under equal seeds."""
    by_arm = {arm: [float(row["validation_loss"]) for row in rows if row["arm"] == arm] for arm in ARMS}
    cells = []
    for arm, losses in by_arm.items():
        differences = [a - b for a, b in zip(losses, by_arm["single"], strict=True)]
        better = f"{sum(d < 0 for d in differences)} of {seeds}"
        cells.append(
            [
                arm,
                f"{median(losses):.4f}",
                *(("", "") if arm == "single" else (spread(differences, "+.4f"), better)),
            ]
        )
    header = ("arm", "validation loss (nats)", "difference to single", "seeds better")
    return "\n".join(markdown_table(header, cells))


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.parallel_start", __doc__, StartOptions, run))
