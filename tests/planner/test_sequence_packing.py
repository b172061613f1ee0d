"""The emulated schedulers against Megatron-LM's own, and what every packing must keep."""

import gzip
import json
from typing import Any

import numpy as np
import pytest

from darts_parallel.planner.sequence_packing import (
    Wave,
    default_dynamic_cp,
    dp_balanced,
    padded,
)
from tests.support.sources import ROOT


def recorded() -> list[dict[str, Any]]:
    data = json.loads(gzip.decompress((ROOT / "tests/golden/packed_batches.json.gz").read_bytes()))
    assert data["megatron_core"] == "0.19.0"
    batches: list[dict[str, Any]] = data["batches"]
    return batches


def packed(batch: dict[str, Any]) -> list[Wave]:
    lengths, dp, cp = batch["lengths"], batch["dp"], batch["cp"]
    if "min_cp" in batch:
        return default_dynamic_cp(lengths, dp * cp, batch["budget"], batch["min_cp"])
    return dp_balanced(lengths, dp, cp, batch["budget"])


def test_a_thousand_batches_are_packed_as_megatron_core_packs_them() -> None:
    batches = recorded()
    assert len(batches) == 1_000
    assert sum("min_cp" in batch for batch in batches) == 500
    for batch in batches:
        found = [[[own.ranks, list(own.sequences)] for own in wave] for wave in packed(batch)]
        assert found == batch["waves"], batch


def test_every_sequence_is_packed_once_on_all_ranks_within_the_budget() -> None:
    for batch in recorded()[:200]:
        lengths = np.array(batch["lengths"])
        waves = packed(batch)
        numbers = [n for wave in waves for own in wave for n in own.sequences]
        assert sorted(numbers) == list(range(len(lengths)))
        for wave in waves:
            assert sum(own.ranks for own in wave) == batch["dp"] * batch["cp"]
            for own in wave:
                assert lengths[list(own.sequences)].sum() <= own.ranks * batch["budget"]


def test_padding_repeats_the_longest_sequence_of_each_micro_batch() -> None:
    waves = padded([3, 5, 4, 1, 2, 2, 9, 7], dp=2, cp=4, size=2)
    found = [[(own.ranks, own.sequences) for own in wave] for wave in waves]
    assert found == [[(4, (1, 1)), (4, (2, 2))], [(4, (4, 4)), (4, (6, 6))]]


@pytest.mark.parametrize(("length", "ranks"), [(64, 1), (65, 2), (129, 4), (512, 8)])
def test_a_sequence_gets_the_next_power_of_two_of_ranks_that_holds_it(
    length: int, ranks: int
) -> None:
    groups = default_dynamic_cp([length, *[64] * 7], 8, 64)[0]
    assert groups[0].ranks == ranks
