"""Does the bilevel search find plans that reach a target loss sooner?

    python -m experiments.bilevel                                    21 trainings a plan, of 7 searches
    python -m experiments.bilevel bilevel.seeds=[0,1] bilevel.retrain_seeds=1 folder=outputs/two publish=true

`darts-parallel experiment=bilevel` with more seeds, baselines (random_plans=3 of equal speed), and a folder
that does not change, so that a run goes on where it stopped. All other arguments are those of the command.
Writes what `darts_parallel.bilevel.protocol` says.
"""

import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import torch

from darts_parallel.bilevel import (
    Jobs,
    Protocol,
    Row,
    SeedWatcher,
    Trainings,
    load_corpus,
    read_seeds,
    rows_of,
    spread,
)
from darts_parallel.config import guarded
from darts_parallel.errors import ConfigError
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.bilevel_baselines import baselines
from experiments.results_page import Page, publish

TABLE = [
    "bilevel.seeds=[0,1,2,3,4,5,6]",
    "bilevel.retrain_seeds=3",
    "bilevel.variants=[bilevel,raw,all_16_bit]",
]
"""Settings of the table beyond one run of the command."""
OPTIONS = {"folder": "outputs/bilevel", "publish": "false", "random_plans": "3"}
"""Arguments of this command alone, with their defaults."""
TIE = 1e-9
"""Ratios this close to 1 are ties: equal plans."""

RESAMPLES = 65_536
"""Sign patterns that the permutation test draws; samples of up to 16 are enumerated."""


class Printer(SeedWatcher):
    """Prints which seeds are done."""

    def on_seed(self, seed: int, data: dict[str, Any]) -> None:
        """Print the seed."""
        print(f"seed {seed} done", flush=True)


def paired(rows: Sequence[Row]) -> str:
    """Compare bilevel with every other variant under equal retraining seeds: time to target, wins, and p.

    p is that of a mean difference under exchangeable signs, two-sided (Fisher 1935).
    """
    variants: dict[str, list[Row]] = {}
    for row in rows:
        variants.setdefault(row["variant"], []).append(row)
    mine = {(row["seed"], row["retrain_seed"]): row for row in variants.pop("bilevel")}
    lines = []
    for variant, others in variants.items():
        losses = []
        logs = []
        for row in others:
            own = mine[row["seed"], row["retrain_seed"]]
            losses.append(own["test_loss"] - row["test_loss"])
            logs.append(log(own["time_to_target_s"] / row["time_to_target_s"]))
        won = sum(ratio < -TIE for ratio in logs)
        lost = sum(ratio > TIE for ratio in logs)
        counts = f"{won}, {len(logs) - won - lost}, {lost}"
        times = spread([exp(ratio) for ratio in logs], ".3f")
        p = p_of_signs(logs) if won + lost else 1.0
        lines.append((variant, spread(losses, "+.4f"), times, counts, f"{p:.3f}"))
    header = (
        "bilevel against",
        "loss difference (nats)",
        "time to target, ratio",
        "won, tied, lost",
        "p",
    )
    return "\n".join(markdown_table(header, lines))


def p_of_signs(logs: Sequence[float]) -> float:
    """Test whether the mean is 0 under exchangeable signs; one value proves nothing."""
    from scipy.stats import permutation_test

    if len(logs) < 2:
        return 1.0
    given: dict[str, Any] = {"permutation_type": "samples", "rng": 0}
    test = permutation_test((np.array(logs),), np.mean, n_resamples=RESAMPLES, **given)
    return float(test.pvalue)


def main(arguments: list[str]) -> int:
    """Run the seeds and report; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    torch.set_num_threads(1)
    own = dict(OPTIONS)
    overrides = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in OPTIONS:
            own[key] = value
        else:
            overrides.append(argument)
    problem = load_problem(["experiment=bilevel", *TABLE, *overrides])
    if problem.config.bilevel is None:
        raise ConfigError("bilevel=null leaves nothing to search; try bilevel.seeds=[0].")
    folder = Path(own["folder"])
    corpus = load_corpus()
    with Jobs(problem.config.bilevel.processes) as jobs:
        makers = baselines(Trainings(folder / "retrained", corpus, jobs), int(own["random_plans"]))
        text = Protocol(problem, corpus, folder, jobs, watcher=Printer(), baselines=makers).run()
    text += "\n" + paired([row for data in read_seeds(folder) for row in rows_of(data)]) + "\n"
    print(text)
    if own["publish"] == "true":
        command = " ".join(["python -m experiments.bilevel", *overrides])
        publish(Page("bilevel", "Does the bilevel loop choose what pays?", command, text))
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded("experiments.bilevel", lambda: main(sys.argv[1:])))
