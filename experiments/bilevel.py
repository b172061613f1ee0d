"""Does the bilevel search find plans that reach a target loss sooner?

    python -m experiments.bilevel                                    21 trainings a plan, of 7 searches
    python -m experiments.bilevel bilevel.seeds=[0,1] bilevel.retrain_seeds=1 folder=outputs/two publish=true

The same as `darts-parallel experiment=bilevel` with all arms, more seeds, and a folder that does not change,
so that a run goes on where it stopped. All other arguments are those of the command. Writes what
`darts_parallel.bilevel.protocol` says.
"""

import sys
from pathlib import Path

import torch

from darts_parallel.bilevel.data import load_corpus, unigram_entropy
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.protocol import Protocol
from darts_parallel.config.bilevel import ARMS
from darts_parallel.config.options import guarded
from darts_parallel.problem.problem import load_problem
from experiments.results_page import publish

FOLDER = "outputs/bilevel"
TABLE = [
    "bilevel.seeds=[0,1,2,3,4,5,6]",
    "bilevel.retrain_seeds=3",
    "bilevel.random_plans=3",
    f"bilevel.arms=[{','.join(ARMS)}]",
]
"""What the table needs beyond one run of the command."""


def main(arguments: list[str]) -> int:
    """Run the seeds and report; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").strip())
        return 0
    torch.set_num_threads(1)
    own = {key: value for key, _, value in (argument.partition("=") for argument in arguments)}
    folder = Path(own.get("folder", FOLDER))
    overrides = [
        argument for argument in arguments if argument.partition("=")[0] not in ("folder", "publish")
    ]
    problem = load_problem(["experiment=bilevel", *TABLE, *overrides])
    assert problem.config.bilevel is not None
    corpus = load_corpus()
    print(f"unigram entropy {unigram_entropy(corpus.train):.3f} nats, {len(corpus.train):,} training bytes")
    with Jobs(problem.config.bilevel.processes) as jobs:
        protocol = Protocol(problem, corpus, folder, jobs)
        text = protocol.run(lambda seed, data: print(f"seed {seed} done", flush=True))
    print(text)
    if own.get("publish") == "true":
        command = " ".join(["python -m experiments.bilevel", *overrides])
        publish("bilevel", "Does the bilevel loop choose what pays?", command, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded("experiments.bilevel", lambda: main(sys.argv[1:])))
