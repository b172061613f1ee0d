"""Segments as a list against the same programs on whole arrays."""

import numpy as np
import pytest

from darts_parallel.exact.segments import (
    StageSegments,
    best_bottleneck,
    best_sum,
    forward_sums,
    rising_limits,
    split_below,
)


@pytest.mark.parametrize("seed", range(8))
def test_programs_over_a_list_equal_those_over_arrays(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, layers = int(rng.integers(1, 6)), int(rng.integers(6, 12))
    fused = np.append(False, rng.random(layers - 1) < 0.15)
    every = StageSegments.legal(stages, fused)
    listed = every.keep(rng.random(len(every)) < 0.9)
    values = rng.random(len(listed))
    dense = np.full((stages, layers + 1, layers + 1), np.inf)
    dense[listed.stage, listed.first, listed.end] = values
    assert (listed.before(values, np.add) == forward_sums(dense)).all()
    assert listed.least_sum(values) == best_sum(dense)
    assert listed.least_maximum(values) == best_bottleneck(dense)
    turned = forward_sums(np.ascontiguousarray(dense[::-1, ::-1, ::-1].swapaxes(1, 2)))[::-1, ::-1]
    assert (listed.after(values, np.add) == turned).all()
    limits = list(rising_limits(dense))
    assert list(listed.rising_limits(values)) == limits
    for limit in limits[::5]:
        assert listed.split_below(values, limit) == split_below(dense, limit)


def test_every_stage_has_a_layer_and_begins_where_it_may() -> None:
    legal = StageSegments.legal(3, np.array([False, False, True, False, False]))
    found = set(zip(legal.stage.tolist(), legal.first.tolist(), legal.end.tolist(), strict=True))
    # layers 1 and 2 are one unit
    assert found == {
        (0, 0, 1), (0, 0, 3), (1, 1, 3), (1, 1, 4), (1, 3, 4), (2, 3, 5), (2, 4, 5),
    }  # fmt: skip
