"""Train by a plan: darts_parallel.run builds the model, divides it, and makes the steps.

Run on every node, with data of your own in `batch`, and train_torch.json next to this file:
    torchrun --nnodes 2 --nproc-per-node 4 --node-rank RANK --master-addr ADDRESS train_torch.py [--steps 10]
It takes nccl where every process has a GPU, else gloo on the CPU.
"""

# toy on toy, 8 GPUs; written by darts-parallel
# dp 8 · tp 1 · pp 1 · micro-batch 1 × 2 · ZeRO-0

import argparse
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.errors import DartsParallelError
from darts_parallel.run import launched, leave


def batch(step: int) -> Tensor:
    """Tokens of the whole global batch, inputs and targets: random ones, yours to replace."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(256, (16, 64 + 1), generator=generator)


def main() -> None:
    """Join the processes and train; every rank computes its part, the first prints the mean loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    try:
        with launched(Path(__file__).with_name("train_torch.json")) as engine:
            for step in range(steps):
                loss = engine.step(batch(step))
                if engine.meshes.rank == 0:
                    print(f"step {step} loss {loss:.6f}", flush=True)
    except DartsParallelError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
    leave(0)
