"""PyTorch by `darts_parallel.run`: a program for torchrun, and a file with the plan.

The program takes every plan that `run` executes, layer-wise ones included: it is `run` that
executes it.
"""

import json
from dataclasses import asdict, replace

from darts_parallel.errors import DartsParallelError, UnsupportedError
from darts_parallel.export.common import Exported, Request
from darts_parallel.plans import SCHEMA, refuse_model, refuse_unexecutable

PROGRAM = '''"""Train by a plan: darts_parallel.run builds the model, divides it, and makes the steps.

Run on every node, with data of your own in `batch`, and {name}.json next to this file:
    {launch} [--steps 10]
It takes nccl where every process has a GPU, else gloo on the CPU.
"""

{headline}

import argparse
from pathlib import Path

import torch
from torch import Tensor

from darts_parallel.errors import DartsParallelError
from darts_parallel.run import launched, leave


def batch(step: int) -> Tensor:
    """Tokens of the whole global batch, inputs and targets: random ones, yours to replace."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint({model.vocab_size}, ({batch}, {training.seq_len} + 1), generator=generator)


def main() -> None:
    """Join the processes and train; every rank computes its part, the first prints the mean loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    try:
        with launched(Path(__file__).with_name("{name}.json")) as engine:
            for step in range(steps):
                loss = engine.step(batch(step))
                if engine.meshes.rank == 0:
                    print(f"step {{step}} loss {{loss:.6f}}", flush=True)
    except DartsParallelError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
    leave(0)
'''
NAME = "train_torch"


def export(job: Request) -> Exported:
    """Write the program `train_torch.py` and its plan `train_torch.json`.

    Errors:
        UnsupportedError: `darts_parallel.run` cannot execute it.
    """
    _check(job)
    if not job.writes:
        return Exported({})
    problem = job.problem
    training = problem.training
    nodes, gpus = job.nodes
    launch = f"torchrun --nnodes {nodes} --nproc-per-node {gpus or 'GPUS'}"
    if nodes > 1:
        launch += " --node-rank RANK --master-addr ADDRESS"
    launch += f" {NAME}.py"
    parts = {"headline": job.headline(), "model": job.model, "training": training}
    program = PROGRAM.format(name=NAME, launch=launch, batch=training.global_batch_size, **parts)
    ranks = range(problem.cluster.num_devices)
    plan = job.plan.to_dict(problem.model.layer_names, ranks, experts=problem.model.has_experts)
    data = {
        "schema": SCHEMA,
        **plan,
        "config": asdict(replace(problem.config, training=job.training)),
    }
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    notes = (
        "the tokens are random: write your own batch()",
        f"start it on every node, which needs darts-parallel and both files: {launch}",
        "rotary angles have the base 10000, and Adam the rate 0.001: engine.optimizer is yours to set",
    )
    return Exported({f"{NAME}.py": program, f"{NAME}.json": text}, notes)


def _check(job: Request) -> None:
    job.settle()
    try:
        refuse_model(job.problem.model, job.training)
    except UnsupportedError as error:
        what, _, way = str(error).removesuffix(".").partition("; try ")
        raise job.refuse(what, way) from None
    try:
        refuse_unexecutable(job.plan, job.problem)
    except DartsParallelError as error:
        what = str(error).removeprefix("plan: ").partition("; try ")[0]
        raise job.refuse(what, "space=executable") from None
