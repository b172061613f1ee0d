"""Does looking ahead from trained weights price few bits as trainings from scratch do?

    python -m experiments.bilevel_lookahead

One block of the toy of `experiment=bilevel` sends its sums at 2 bits over 4 ranks. The truth is the excess
of the training loss at the end of trainings from scratch. A look-ahead starts from exactly trained weights,
trains some steps with and without the few bits on the same batches, and compares validation losses.
"""

import copy
from statistics import mean

import torch

from darts_parallel.bilevel._trainer import WeightTrainer
from darts_parallel.bilevel.data import load_corpus, sample
from darts_parallel.bilevel.settings import BilevelSettings, TransformerShape
from darts_parallel.bilevel.space import EXACT, Candidate
from darts_parallel.bilevel.transformer import plan_loss

SEEDS = (0, 1, 2)
STEPS = 140
READ = 30
"""Last steps of a training from scratch whose mean loss counts."""
STARTS = (40, 70, 100)
AHEAD = (5, 10, 20, 40)
FEW = Candidate(4, 1, tp_comm_bits=2)
BLOCKS = 4
PLANS = [[EXACT] * BLOCKS] + [
    [FEW if j == i else EXACT for j in range(BLOCKS)] for i in range(BLOCKS)
]


def run_seed(seed: int) -> tuple[list[float], dict[tuple[int, int], list[float]]]:
    """Return the true excess of every block, and that of look-aheads by first step and length, nats."""
    shape = TransformerShape(BLOCKS, 64, 4, 32)
    settings = BilevelSettings(shape=shape, global_batch_size=16)
    corpus = load_corpus()
    held_out = sample(corpus.validation, 192, 32, torch.Generator().manual_seed(seed + 77))
    ends = []
    starts: dict[int, WeightTrainer] = {}
    for plan in PLANS:
        trainer = WeightTrainer(settings, 16, seed, measure_noise=False)
        losses = []
        for step in range(1, STEPS + 1):
            losses.append(trainer.learn_plan(trainer.next_batch(corpus.train), plan).loss)
            if plan is PLANS[0] and step in STARTS:
                starts[step] = copy.deepcopy(trainer)
        ends.append(mean(losses[-READ:]))
    found: dict[tuple[int, int], list[float]] = {}
    for start, known in starts.items():
        for plan in PLANS:
            trainer = copy.deepcopy(known)
            for step in range(1, max(AHEAD) + 1):
                trainer.learn_plan(trainer.next_batch(corpus.train), plan)
                if step in AHEAD:
                    with torch.no_grad():
                        loss = float(plan_loss(trainer.weights, held_out, plan))
                    found.setdefault((start, step), []).append(loss)
    excess = {key: [own - losses[0] for own in losses[1:]] for key, losses in found.items()}
    return [own - ends[0] for own in ends[1:]], excess


def main() -> None:
    """Print the order of blocks by each look-ahead against the truth."""
    from scipy.stats import spearmanr

    torch.set_num_threads(1)
    runs = [run_seed(seed) for seed in SEEDS]
    print("truth", [truth for truth, _ in runs])
    for key in runs[0][1]:
        each = [float(spearmanr(truth, ahead[key]).statistic) for truth, ahead in runs]
        print(key, [ahead[key] for _, ahead in runs], f"Spearman {mean(each):+.2f}", each)


if __name__ == "__main__":
    main()
