"""A bilevel search small enough for tests."""

import sysconfig
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.loop import BilevelLoop, BilevelRecord
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.problem.problem import Problem, load_problem

BILEVEL: dict[str, Any] = {
    "num_steps": 12,
    "warmup_steps": 6,
    "retrain_steps": 8,
    "evaluate_every": 2,
    "validation_sequences": 4,
    "trial_steps": 4,
    "trial_seeds": 1,
    "num_restarts": 2,
    "logit_every": 1,
    "look_ahead_every": 2,
    "look_ahead_steps": 2,
    "retrain_factor": 1.5,
    "retrain_seeds": 1,
    "batch_candidates": [],
}
SIZES = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "training.seq_len=8",
    "training.global_batch_size=8",
    "space.tp=[1,2]",
    "space.tp_comm_bits=[16,4]",
    "space.grad_comm_bits=[16,4]",
    "space.pp=[1,2]",
    "space.num_micro_batches=[1,2]",
    "space.zero_stage=0",
    "space.recompute=none",
    "space.sequence_parallel=false",
]
OVERRIDES = [
    "experiment=bilevel",
    *SIZES,
    *(f"bilevel.{key}={value}" for key, value in BILEVEL.items()),
]
PLACES = {
    "num_blocks": ("model", "num_layers"),
    "width": ("model", "hidden_size"),
    "context": ("training", "seq_len"),
    "global_batch_size": ("training", "global_batch_size"),
    "tp": ("space", "tp"),
    "tp_bits": ("space", "tp_comm_bits"),
    "grad_bits": ("space", "grad_comm_bits"),
    "space_pp": ("space", "pp"),
    "space_tp": ("space", "tp"),
    "space_zero_stage": ("space", "zero_stage"),
    "space_recompute": ("space", "recompute"),
    "space_num_micro_batches": ("space", "num_micro_batches"),
}
"""Short names of what tests change outside the group `bilevel`."""


@lru_cache(maxsize=1)
def base() -> Problem:
    return load_problem(OVERRIDES)


def tiny_problem(cluster: str | None = None, num_devices: int = 8, **changes: Any) -> Problem:
    """The tiny problem with other values of `PLACES` or of the group `bilevel`."""
    config = (
        base().config
        if cluster is None
        else load_problem([*OVERRIDES, f"cluster={cluster}"]).config
    )
    parts: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, name = PLACES.get(key, ("bilevel", key))
        parts.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
    changed: dict[str, Any] = {
        name: replace(getattr(config, name), **part) for name, part in parts.items()
    }
    nodes = [replace(config.cluster.nodes[0], gpus=num_devices)]
    return Problem.from_config(
        replace(config, **changed, cluster=replace(config.cluster, nodes=nodes))
    )


def tiny_settings(seed: int = 0, **changes: Any) -> BilevelSettings:
    return replace(BilevelSettings.of(tiny_problem(**changes)), seed=seed)


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """One package of the standard library: to look through all of it takes longer than most tests."""
    return load_corpus(Path(sysconfig.get_path("stdlib")) / "email")


def tiny_loop(seed: int = 0, **changes: Any) -> BilevelLoop:
    return BilevelLoop(tiny_settings(seed, **changes), tiny_problem(**changes), corpus())


def records(loop: BilevelLoop) -> list[BilevelRecord]:
    found: list[BilevelRecord] = []
    loop.run(found.append)
    return found
