"""Every legal value of every key of the space, once: a plan, or a sentence that names the key."""

from dataclasses import fields

import pytest

from darts_parallel import schedules
from darts_parallel.config.schema import COMM_BITS, CUTS, OFFLOADS, RECOMPUTE, SPACES, SpaceConfig
from darts_parallel.config.trainer import EXPORTS
from tests.support.commands import QUIET, Command

JOB = ("cluster=toy_1x2", "search.num_steps=2", "search.num_restarts=1")
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
NODE_ORDERS = ("auto", "all", "shifts", "adjacent", "given")
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
    "node_orders": NODE_ORDERS,
    "memory_margin": (0.0, 0.9),
    "out_of_memory": (1e-4, 0.5),
    "executable": SWITCHES,
    "trainer": EXPORTS,
}
"""Legal values by key; a job may be too small for some of them."""
NULL = {"shard_size", "virtual_stages", "cp", "etp", "tp_comm_bits", "grad_comm_bits"}
"""Keys of which null is no default."""


def test_every_key_has_values() -> None:
    assert set(VALUES) == {entry.name for entry in fields(SpaceConfig)}


@pytest.mark.slow
@pytest.mark.parametrize("key", VALUES)
def test_every_legal_value_is_planned_or_refused_by_its_key(command: Command, key: str) -> None:
    of_experts = key in ("ep", "etp")
    model = "model=toy_moe" if of_experts else "model=toy"
    sizes = ("micro_batch_size", "virtual_stages", "schedules", "dp", "pp")
    usual = [
        f"space.{other}={value}"
        for other, value in USUAL.items()
        if other != key and not (other == "num_micro_batches" and key in sizes)
    ]
    free = ("null",) if key in NULL else ()
    for value in (*VALUES[key], *free):
        given = f"space.{key}={value}"
        done = command(model, *JOB, *QUIET, *usual, given, f"hydra.run.dir=run_{value}")
        if done.status == 0:
            assert f"run_{value}/plan.json" in done.files, given
            assert "is missing" not in done.out, done.out
            continue
        assert done.status == 2, given
        assert f"space.{key}" in done.err, done.err
        assert done.err.count("\n") == 1
        assert "; " in done.err, done.err
