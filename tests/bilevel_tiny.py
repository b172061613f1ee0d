"""A bilevel search small enough for tests."""

from functools import lru_cache
from typing import Any

import torch

from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.loop import BilevelRecord, BilevelSearch
from darts_parallel.bilevel.settings import BilevelSettings

TINY: dict[str, Any] = {
    "num_blocks": 2, "width": 16, "num_heads": 4, "context": 8, "global_batch_size": 8, "num_steps": 16,
    "warmup_steps": 8, "retrain_steps": 12, "evaluate_every": 2, "validation_sequences": 4,
    "trial_steps": 2, "trial_every": 4,
}  # fmt: skip


def tiny_settings(**changes: Any) -> BilevelSettings:
    return BilevelSettings(**(TINY | changes))


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    return load_corpus(max_bytes=200_000)


def tiny_search(**changes: Any) -> BilevelSearch:
    return BilevelSearch(tiny_settings(**changes), corpus())


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
