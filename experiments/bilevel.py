"""Does the bilevel search find plans that reach a target loss sooner?

    python -m experiments.bilevel                                    5 seeds on the slow network
    python -m experiments.bilevel cluster=fast_network bilevel.seeds=[0,1] folder=outputs/fast
    python -m experiments.bilevel space.tp=null folder=outputs/tp1   with tp 1, which sums nothing

The same as `darts-parallel experiment=bilevel` with a folder that does not change, so that a run goes on
where it stopped. All other arguments are those of the command. Writes what `darts_parallel.bilevel.protocol`
says. On an idle core a seed takes about 4 minutes at the default sizes.
"""

import sys
from pathlib import Path

import torch

from darts_parallel.bilevel.data import load_corpus, unigram_entropy
from darts_parallel.bilevel.protocol import Protocol
from darts_parallel.errors import DartsParallelError
from darts_parallel.problem.problem import load_problem

FOLDER = "outputs/bilevel"


def main(arguments: list[str]) -> None:
    """Run the seeds and report."""
    torch.set_num_threads(1)
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("folder=")]
    overrides = [argument for argument in arguments if not argument.startswith("folder=")]
    try:
        problem = load_problem(["experiment=bilevel", *overrides])
        corpus = load_corpus()
        print(
            f"unigram entropy {unigram_entropy(corpus.train):.3f} nats, {len(corpus.train):,} training bytes"
        )
        protocol = Protocol(problem, corpus, Path(given[-1] if given else FOLDER))
        print(protocol.run(lambda seed, data: print(f"seed {seed} done", flush=True)))
    except DartsParallelError as error:
        print(f"experiments.bilevel: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
