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
from darts_parallel.problem import load_problem
from darts_parallel.report import markdown_table
from experiments.bilevel_baselines import baselines
from experiments.results_page import publish

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


class Printer(SeedWatcher):
    """Prints which seeds are done."""

    def on_seed(self, seed: int, data: dict[str, Any]) -> None:
        """Print the seed."""
        print(f"seed {seed} done", flush=True)


def paired(rows: Sequence[Row]) -> str:
    """Compare bilevel with every other variant under equal retraining seeds: time to target, wins, and p.

    p is that of a mean difference under exchangeable signs, two-sided (Fisher 1935).
    """
    from scipy.stats import permutation_test

    mine = {(row["seed"], row["retrain_seed"]): row for row in rows if row["variant"] == "bilevel"}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != "bilevel"):
        pairs = [
            (mine[row["seed"], row["retrain_seed"]], row)
            for row in rows
            if row["variant"] == variant
        ]
        losses = [a["test_loss"] - b["test_loss"] for a, b in pairs]
        logs = [log(a["time_to_target_s"] / b["time_to_target_s"]) for a, b in pairs]
        won, lost = sum(x < -TIE for x in logs), sum(x > TIE for x in logs)
        p = 1.0
        if won + lost and len(logs) > 1:
            test = permutation_test(
                (np.array(logs),),
                lambda x, axis: x.mean(axis),
                vectorized=True,
                permutation_type="samples",
                n_resamples=65_536,
                rng=0,
            )
            p = float(test.pvalue)
        lines.append(
            [
                variant,
                spread(losses, "+.4f"),
                spread([exp(x) for x in logs], ".3f"),
                f"{won}, {len(logs) - won - lost}, {lost}",
                f"{p:.3f}",
            ]
        )
    header = (
        "bilevel against",
        "loss difference (nats)",
        "time to target, ratio",
        "won, tied, lost",
        "p",
    )
    return "\n".join(markdown_table(header, lines))


def main(arguments: list[str]) -> int:
    """Run the seeds and report; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    torch.set_num_threads(1)
    given = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    own = OPTIONS | {key: given[key] for key in OPTIONS if key in given}
    overrides = [argument for argument in arguments if argument.partition("=")[0] not in OPTIONS]
    problem = load_problem(["experiment=bilevel", *TABLE, *overrides])
    assert problem.config.bilevel is not None
    folder, corpus = Path(own["folder"]), load_corpus()
    with Jobs(problem.config.bilevel.processes) as jobs:
        makers = baselines(Trainings(folder / "retrained", corpus, jobs), int(own["random_plans"]))
        text = Protocol(problem, corpus, folder, jobs, watcher=Printer(), baselines=makers).run()
    text += "\n" + paired([row for data in read_seeds(folder) for row in rows_of(data)]) + "\n"
    print(text)
    if own["publish"] == "true":
        command = " ".join(["python -m experiments.bilevel", *overrides])
        publish("bilevel", "Does the bilevel loop choose what pays?", command, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded("experiments.bilevel", lambda: main(sys.argv[1:])))
