"""Write the excerpts of trainers' files into their pages: `python docs/write_excerpts.py`.

Each page has one block below the line `<!-- excerpt -->`. The plans are given, so no search runs: they are
those of the commands on the pages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from darts_parallel.export import export_plan
from darts_parallel.plans import LayerStrategy, Plan
from darts_parallel.problem import load_problem

FOLDER = Path(__file__).parent / "how-to"
BLOCK = re.compile(r"(?<=<!-- excerpt -->\n\n```)\w+\n.*?(?=\n```)", re.DOTALL)
JOB = ["model=llama3_8b", "cluster=h100_8x8"]


@dataclass(frozen=True)
class Excerpt:
    """A plan, and the lines of a trainer's file that the page shows."""

    target: str
    file: str
    language: str
    strategy: LayerStrategy
    num_micro_batches: int
    ranges: tuple[tuple[str, str], ...]
    """Beginnings of the first and last line of each part."""
    stages: tuple[int, ...] = (35,)
    other: LayerStrategy | None = None
    """Strategy of the last eight blocks, where layers may differ."""

    def lines(self) -> Iterator[str]:
        """Yield the lines that the page shows."""
        problem = load_problem([*JOB, f"trainer={self.target}"])
        layers = [self.strategy] * problem.num_layers
        if self.other is not None:
            layers[-10:-2] = [self.other] * 8
        cuts = (0, *accumulate(self.stages))
        plan = Plan(self.num_micro_batches, cuts, tuple(layers))
        text = export_plan(problem, plan, self.target).files[self.file].splitlines()
        for number, (first, last) in enumerate(self.ranges):
            begin = next(i for i, line in enumerate(text) if line.startswith(first))
            end = next(i for i, line in enumerate(text[begin:], begin) if line.startswith(last))
            yield from ["..."] * (number > 0)
            yield from text[begin : end + 1]


GRADIENTS_SHARDED = LayerStrategy(tp=1, dp=64, zero_stage=2)
SHARDED = LayerStrategy(tp=1, dp=64, zero_stage=3, recompute="full")
EXCERPTS = {
    "megatron.md": Excerpt(
        "megatron",
        "megatron.sh",
        "bash",
        GRADIENTS_SHARDED,
        8,
        (("#!", '    "${MEGATRON'),),
    ),
    "torchtitan.md": Excerpt(
        "torchtitan",
        "torchtitan_plan.py",
        "python",
        GRADIENTS_SHARDED,
        8,
        (("from torchtitan", "    return config"),),
    ),
    "deepspeed.md": Excerpt("deepspeed", "deepspeed.json", "json", SHARDED, 8, (("{", "}"),)),
    "accelerate.md": Excerpt(
        "accelerate",
        "accelerate.yaml",
        "yaml",
        SHARDED,
        8,
        (("distributed_type", "  fsdp_version"), ("mixed_precision", "  parallelism_config_tp")),
    ),
    "nanotron.md": Excerpt(
        "nanotron",
        "nanotron.yaml",
        "yaml",
        LayerStrategy(tp=4, dp=16, zero_stage=1, sequence_parallel=True),
        16,
        (("parallelism:", "  zero_stage"),),
    ),
    "galvatron.md": Excerpt(
        "galvatron",
        "galvatron.json",
        "json",
        LayerStrategy(tp=2, dp=32, zero_stage=3, recompute="full"),
        16,
        (("{", "}"),),
        other=LayerStrategy(tp=1, dp=64, zero_stage=3),
    ),
}


def page(name: str) -> str:
    """Return the text of a page with its excerpt."""
    excerpt = EXCERPTS[name]
    block = "\n".join([excerpt.language, *excerpt.lines()])
    return BLOCK.sub(lambda _: block, (FOLDER / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for name in EXCERPTS:
        (FOLDER / name).write_text(page(name), encoding="utf-8")
