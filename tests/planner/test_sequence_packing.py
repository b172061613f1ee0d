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
            longest = lengths[[n for own in wave for n in own.sequences]].max()
            for own in wave:
                held = lengths[list(own.sequences)]
                assert held.sum() <= own.ranks * batch["budget"]
                # Megatron-LM's limit of a rank's work, 1.05 times the right side, is never met
                assert (held**2).sum() / own.ranks <= longest * batch["budget"]


def test_padding_repeats_the_longest_sequence_of_each_micro_batch() -> None:
    waves = padded([3, 5, 4, 1, 2, 2, 9, 7], dp=2, cp=4, size=2)
    found = [[(own.ranks, own.sequences) for own in wave] for wave in waves]
    assert found == [[(4, (1, 1)), (4, (2, 2))], [(4, (4, 4)), (4, (6, 6))]]


def test_groups_of_any_size_hold_their_sequences_on_the_fewest_ranks() -> None:
    # they need 3 and 2 ranks; the idle ones go to the smallest group, the first of equal ones
    (wave,) = default_dynamic_cp([192, 100], 7, 64, any_size=True)
    assert [(own.ranks, own.sequences) for own in wave] == [(4, (0,)), (3, (1,))]
    (wave,) = default_dynamic_cp([320, 192], 8, 64, any_size=True)
    assert [(own.ranks, own.sequences) for own in wave] == [(5, (0,)), (3, (1,))]
    rng = np.random.default_rng(0)
    for ranks in range(1, 25):
        lengths = rng.integers(1, 64 * ranks + 1, 40)
        waves = default_dynamic_cp(lengths.tolist(), ranks, 64, min(3, ranks), any_size=True)
        numbers = [n for wave in waves for own in wave for n in own.sequences]
        assert sorted(numbers) == list(range(40))
        for wave in waves:
            assert sum(own.ranks for own in wave) == ranks
            for own in wave:
                assert own.ranks >= min(3, ranks)
                assert lengths[list(own.sequences)].sum() <= 64 * own.ranks


@pytest.mark.parametrize(("length", "ranks"), [(64, 1), (65, 2), (129, 4), (512, 8)])
def test_a_sequence_gets_the_next_power_of_two_of_ranks_that_holds_it(
    length: int, ranks: int
) -> None:
    groups = default_dynamic_cp([length, *[64] * 7], 8, 64)[0]
    assert groups[0].ranks == ranks
