"""Measure a Transformer block on this machine, for `cost=profiled`.

    python -m experiments.measure_block problem=[model=toy,training=toy,cluster=toy] out=block.csv
    darts-parallel model=toy training=toy cluster=toy cost=profiled cost.profile=block.csv

Runs one tensor-parallel rank's shard of one block, forward and backward, for every legal degree and
every power of two as micro-batch, on one CPU thread, and writes medians and the bytes that autograd keeps.
The block is a GPT one: models with gated MLPs or fewer KV heads are refused.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from darts_parallel.bilevel.measured_speed import profile_block, write_profile
from darts_parallel.bilevel.settings import shape_of
from darts_parallel.config.checks import require_at_least
from darts_parallel.config.options import run_main
from darts_parallel.plan.degrees import divisors, tensor_degrees
from darts_parallel.problem.problem import load_problem
from darts_parallel.report.tables import filled_table


@dataclass
class MeasureOptions:
    """What to measure."""

    problem: list[str] = field(default_factory=lambda: ["model=toy", "training=toy", "cluster=toy"])
    """Overrides of the command; the model's sizes and the job's sequence length are taken from them."""
    max_micro_batch: int = 8
    repeats: int = 20
    out: str = "block.csv"

    def __post_init__(self) -> None:
        for key in ("max_micro_batch", "repeats"):
            require_at_least(key, getattr(self, key), 1)


def run(options: MeasureOptions) -> int:
    """Measure, write, print."""
    torch.set_num_threads(1)
    problem = load_problem(options.problem)
    sizes = [1 << i for i in range(options.max_micro_batch.bit_length())]
    batch = problem.training.global_batch_size
    legal = [size for size in sizes if size <= options.max_micro_batch and size in divisors(batch)]
    rows = profile_block(
        shape_of(problem), tensor_degrees(problem), legal, options.repeats, model=problem.model.config.name
    )
    write_profile(Path(options.out), rows)
    console = Console()
    header = ("tp", "micro-batch", "forward ms", "backward ms", "kept for backward, KiB")
    cells = [
        (str(row.tp), str(row.micro_batch), f"{1e3 * row.forward_s:.3f}", f"{1e3 * row.backward_s:.3f}",
         f"{row.saved_bytes / 1024:.0f}")
        for row in rows
    ]  # fmt: skip
    console.print(filled_table(f"{rows[0].model}, one block on {rows[0].gpu}", header, cells, ()))
    console.print(f"profile: {options.out}", soft_wrap=True, highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main("experiments.measure_block", __doc__, MeasureOptions, run))
