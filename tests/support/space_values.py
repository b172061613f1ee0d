"""Try each legal value of every key of the space for each trainer: a plan, or a sentence that names why not.

    python -m tests.support.space_values            # some 110 values x 7 trainers, and their page

A small job, a search of two steps, and the trainer's files. `tests/cli/test_space_values.py` runs the command
with the same values and no trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from darts_parallel import load_problem, plan, schedules
from darts_parallel.config import (
    COMM_BITS,
    CUTS,
    EXPORTS,
    OFFLOADS,
    RECOMPUTE,
    SPACES,
)
from darts_parallel.errors import DartsParallelError
from darts_parallel.export import export_plan
from darts_parallel.report import markdown_table
from experiments.results_page import Page, publish

JOB = (
    "cluster=toy_1x2",
    "search.num_steps=2",
    "search.num_restarts=1",
    "search.order_passes=1000000",
)
USUAL = {
    "kind": "uniform",
    "zero_stage": "[1,3]",
    "recompute": "none",
    "sequence_parallel": "false",
    "num_micro_batches": "[2,4]",
    "out_of_memory": "0.5",
}
"""Pins where another key is tried: a command then takes a second."""
DEGREES = (1, 2, 4)
"""The last one is refused on two GPUs."""
SWITCHES = ("true", "false")
VALUES = {
    "kind": SPACES,
    "pp": DEGREES,
    "num_micro_batches": (1, 2, 16),
    "micro_batch_size": (1, 2, 16),
    "dp": DEGREES,
    "tp": DEGREES,
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "sequence_parallel": SWITCHES,
    "tp_comm_bits": COMM_BITS,
    "grad_comm_bits": COMM_BITS,
    "shard_size": (0, *DEGREES),
    "virtual_stages": (1, 2, 3),
    "schedules": (*schedules.NAMES, schedules.SEARCHED),
    "cut": CUTS,
    "cp": DEGREES,
    "ep": DEGREES,
    "etp": DEGREES,
    "offload": OFFLOADS,
    "axis_order": ("tp-dp-pp", "tp-pp-dp"),
    "node_orders": ("auto", "all", "shifts", "adjacent", "given"),
    "memory_margin": (0.0, 0.9),
    "out_of_memory": (1e-4, 0.5),
    "executable": SWITCHES,
    "trainer": EXPORTS,
}
"""Legal values by key; a job may be too small for some of them."""
ROOMY = ("cluster.devices.toy.memory_GiB=16", "verification.enabled=false")
"""Memory for what a trainer reserves, and no checks."""
LLAMA = ("gated_mlp=true", "learned_positions=false", "linear_bias=false", "norm_bias=false")
"""Parts of a model that every trainer has."""
NULL = {"shard_size", "virtual_stages", "cp", "etp", "tp_comm_bits", "grad_comm_bits"}
"""Keys of which null is no default."""
SIZES = ("micro_batch_size", "virtual_stages", "schedules", "dp", "pp")
"""Keys that pins of micro-batches would contradict."""


@dataclass(frozen=True)
class ValueRow:
    """Hold what one value of a key gives for one trainer."""

    key: str
    value: str
    trainer: str
    refusal: str = ""
    """Sentence of the refusal; empty where files were written."""

    @property
    def named(self) -> bool:
        """Whether a refusal names the key, or the trainer and what it lacks."""
        names = (f"space.{self.key}", f"trainer={self.trainer}", f"export={self.trainer}")
        return any(name in self.refusal for name in names)


def overrides(key: str, value: str) -> list[str]:
    """Return the overrides of a job that give a key of the space a value."""
    usual = [
        f"space.{other}={given}"
        for other, given in USUAL.items()
        if other != key and not (other == "num_micro_batches" and key in SIZES)
    ]
    model = "model=toy_moe" if key in ("ep", "etp") else "model=toy"
    return [model, *JOB, *usual, f"space.{key}={value}"]


def rows_of_key(task: tuple[str, str]) -> list[ValueRow]:
    """Try all values of a key for a trainer."""
    key, trainer = task
    values = [*VALUES[key], *["null"] * (key in NULL)]
    return [_row(ValueRow(key, str(value), trainer)) for value in values]


def _row(row: ValueRow) -> ValueRow:
    """Return the row with the sentence of its refusal, if it is refused."""
    parts = [f"model.{part}" for part in LLAMA]
    given = [*overrides(row.key, row.value), *parts, *ROOMY, f"trainer={row.trainer}"]
    try:
        problem = load_problem(given)
        export_plan(problem, plan(problem).plan, row.trainer)
    except DartsParallelError as error:
        return ValueRow(row.key, row.value, row.trainer, str(error))
    return row


def table(rows: Sequence[ValueRow]) -> str:
    """Return a line a key, values with files of all values by trainer; then what names no key."""
    cells = []
    for key in VALUES:
        own = [row for row in rows if row.key == key]
        counts = []
        for trainer in EXPORTS:
            mine = [row for row in own if row.trainer == trainer]
            counts.append(f"{sum(not row.refusal for row in mine)} of {len(mine)}")
        cells.append((f"`space.{key}`", *counts))
    refused = [row for row in rows if row.refusal]
    wrong = [row for row in refused if not row.named]
    named = [f"- space.{row.key}={row.value}, {row.trainer}: {row.refusal}" for row in wrong]
    verdict = (
        f"{len(rows)} pairs, {len(refused)} refused; {len(wrong)} name neither key nor trainer."
    )
    lines = markdown_table(("values with files", *EXPORTS), cells, (0,))
    return "\n".join([verdict, "", *lines, *[""] * bool(named), *named]) + "\n"


def main() -> None:
    """Try all pairs, and write the page."""
    rows = [row for key, own in product(VALUES, EXPORTS) for row in rows_of_key((key, own))]
    question = "Does each legal value of the space give a plan, or a sentence that names why not?"
    limits = (
        "whether the files run; values that a larger job would admit. The job is `model=toy` on two GPUs. "
        "Its embeddings are tied, so torchtitan refuses every pipeline here; of larger models it takes them."
    )
    command = "python -m tests.support.space_values"
    print(publish(Page("space_values", question, command, table(rows), limits)))


if __name__ == "__main__":
    main()
