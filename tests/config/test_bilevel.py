from dataclasses import fields
from typing import Any

import pytest

from darts_parallel.config.bilevel import BilevelConfig
from darts_parallel.errors import ConfigError

RANGES = {
    entry.name: entry.metadata["range"]
    for entry in fields(BilevelConfig)
    if "range" in entry.metadata
}
LARGEST = {
    key: most for key, (least, most) in RANGES.items() if least == 1 and isinstance(most, int)
}
LARGEST.pop("batch_candidates")


@pytest.mark.parametrize("key", LARGEST)
def test_numbers_of_steps_and_trainings_have_a_least_and_a_largest(key: str) -> None:
    for value, near in ((0, 1), (-3, 1), (10**20, LARGEST[key])):
        with pytest.raises(ConfigError, match=f"bilevel.{key}={value} must be .*try {near}"):
            BilevelConfig(**{key: value})
    assert getattr(BilevelConfig(**{key: LARGEST[key]}), key) == LARGEST[key]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"decay": 1.0}, "bilevel.decay=1 must be at most 0.9999"),
        ({"decay": float("nan")}, "bilevel.decay=nan must be a finite number"),
        ({"learning_rate": float("inf")}, "bilevel.learning_rate=inf must be a finite number"),
        ({"learning_rate": 0.0}, "bilevel.learning_rate=0 must be at least 1e-09"),
        ({"retrain_factor": 0.5}, "bilevel.retrain_factor=0.5 must be .*try 1"),
        ({"warmup_steps": -1}, "bilevel.warmup_steps=-1 must be .*try 0"),
        ({"batch_candidates": [0]}, "bilevel.batch_candidates=0 must be .*try 1"),
    ],
)
def test_values_that_mean_nothing_are_refused_with_a_near_one(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BilevelConfig(**changes)
