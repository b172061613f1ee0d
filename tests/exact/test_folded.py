from itertools import combinations

import numpy as np
import pytest

from darts_parallel.cost import Array
from darts_parallel.exact._chain import DeviceCosts, FoldedSplits

LAYERS, DEVICES, PATHS = 8, 2, 2


def slowest_device(costs: list[DeviceCosts], starts: list[int]) -> float:
    """Return the slowest device of a split with first layers `starts`, by its definition."""
    ends = [*starts[1:], LAYERS]
    values = []
    for device, some in enumerate(costs):
        up = len(starts) - 1 - device
        down_run = some.first[:, ends[device]] - some.first[:, starts[device]]
        up_run = some.second[:, ends[up]] - some.second[:, starts[up]]
        values.append((down_run + some.ways[:, starts[device]] + up_run).max())
    return float(max(values))


def price(seconds: Array, entering: Array, starts: list[int]) -> float:
    """Sum of the stages of a split, by its definition."""
    ends = [*starts[1:], LAYERS]
    runs = sum(seconds[k, a:b].sum() for k, (a, b) in enumerate(zip(starts, ends, strict=True)))
    return float(runs + sum(entering[k, a - 1] for k, a in enumerate(starts[1:])))


@pytest.mark.parametrize("seed", range(8))
def test_nested_stages_are_the_best_of_all_splits_below_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sums = [
        np.pad(rng.uniform(1, 5, (2, PATHS, LAYERS)).cumsum(-1), ((0, 0), (0, 0), (1, 0)))
        for _ in range(DEVICES)
    ]
    costs = [
        DeviceCosts(first, second, rng.uniform(0, 2, (PATHS, LAYERS + 1))) for first, second in sums
    ]
    seconds = rng.uniform(1, 5, (2 * DEVICES, LAYERS))
    entering = rng.uniform(0, 2, (2 * DEVICES - 1, LAYERS - 1))
    begins = rng.uniform(size=LAYERS + 1) < 0.9
    begins[[0, LAYERS]] = True
    every = [
        [0, *inner]
        for inner in combinations(range(1, LAYERS), 2 * DEVICES - 1)
        if begins[list(inner)].all()
    ]
    values = [slowest_device(costs, starts) for starts in every]
    for limit in (np.inf, float(np.median(values)), min(values) * (1 + 1e-12), 0.99 * min(values)):
        splits = FoldedSplits.below(limit, begins, costs)
        left = [starts for starts, value in zip(every, values, strict=True) if value <= limit]
        assert splits.slowest.min() == pytest.approx(min(values) if left else np.inf)
        value, starts = splits.cheapest(seconds, entering)
        assert value == pytest.approx(
            min((price(seconds, entering, some) for some in left), default=np.inf)
        )
        assert starts in left or not left
