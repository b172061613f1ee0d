"""A bilevel search small enough for tests."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.loop import BilevelRecord, BilevelSearch
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.problem import Problem, load_problem

BILEVEL: dict[str, Any] = {
    "num_steps": 16, "warmup_steps": 8, "retrain_steps": 12, "evaluate_every": 2, "validation_sequences": 4,
    "trial_steps": 2, "trial_every": 4,
}  # fmt: skip
SIZES = [
    "model.num_layers=2", "model.hidden_size=16", "training.seq_len=8", "training.global_batch_size=8",
    "space.tp=[1,2,4]",
]  # fmt: skip
OVERRIDES = ["experiment=bilevel", *SIZES, *(f"bilevel.{key}={value}" for key, value in BILEVEL.items())]
PLACES = {
    "num_blocks": ("model", "num_layers"), "width": ("model", "hidden_size"), 
    "context": ("training", "seq_len"),
    "global_batch_size": ("training", "global_batch_size"), "tp": ("space", "tp"),
    "tp_bits": ("space", "tp_comm_bits"), "grad_bits": ("space", "grad_comm_bits"),
}  # fmt: skip
"""Short names of what tests change outside the group `bilevel`."""


@lru_cache(maxsize=1)
def base() -> Problem:
    return load_problem(OVERRIDES)


def tiny_problem(cluster: str | None = None, num_devices: int = 8, **changes: Any) -> Problem:
    """The tiny problem with other values of `PLACES` or of the group `bilevel`."""
    config = base().config if cluster is None else load_problem([*OVERRIDES, f"cluster={cluster}"]).config
    parts: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, name = PLACES.get(key, ("bilevel", key))
        parts.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
    changed: dict[str, Any] = {name: replace(getattr(config, name), **part) for name, part in parts.items()}
    nodes = [replace(config.cluster.nodes[0], gpus=num_devices)]
    return Problem.from_config(replace(config, **changed, cluster=replace(config.cluster, nodes=nodes)))


def tiny_settings(seed: int = 0, **changes: Any) -> BilevelSettings:
    return BilevelSettings.of(tiny_problem(**changes), seed)


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    return load_corpus(max_bytes=200_000)


def tiny_search(seed: int = 0, **changes: Any) -> BilevelSearch:
    problem = tiny_problem(**changes)
    return BilevelSearch(BilevelSettings.of(problem, seed), problem, corpus())


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def records(search: BilevelSearch) -> list[BilevelRecord]:
    found: list[BilevelRecord] = []
    search.run(found.append)
    return found
