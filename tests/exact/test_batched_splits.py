"""Splits of many plans at once against brute force over all splits."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from darts_parallel.exact.batched_splits import Rows, best_splits
from darts_parallel.exact.segments import Array


def random_rows(rng: np.random.Generator, count: int, stages: int, layers: int, *, room: float) -> Rows:
    """Rows without synchronisation; `room` is the memory of a device, in shares of what all layers need."""

    def prefix(*shape: int) -> Array:
        values = rng.uniform(0.5, 2.0, (*shape, layers))
        return np.concatenate([np.zeros((*shape, 1)), values.cumsum(-1)], axis=-1)

    kept, working = prefix(count), rng.uniform(0.0, 2.0, (count, layers))
    return Rows(
        prefix=prefix(count, stages),
        entry=rng.uniform(0.0, 0.3, (count, stages, layers + 1)),
        kept=kept,
        activation=prefix(count),
        working=working,
        in_flight=np.tile(np.arange(stages, 0, -1.0), (count, 1)),
        capacity=rng.uniform(0.8, 1.2, (count, stages)) * room * kept[:, -1:],
        sync=np.zeros((count, stages, layers + 1)),
        later=rng.integers(0, 8, count).astype(float),
        fixed=rng.uniform(0.0, 1.0, count),
        least_sync=np.zeros(count),
        ceiling=np.full(count, np.inf),
        most_sync=np.full(count, np.inf),
    )


def brute_force(rows: Rows, row: int, starts: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """Least seconds of a row over all contiguous splits."""
    stages, layers = rows.prefix.shape[1], rows.num_layers
    best = np.inf
    for inner in combinations(np.flatnonzero(starts[1:layers]) + 1, stages - 1):
        edges = list(pairwise([0, *inner, layers]))
        seconds = [
            rows.prefix[row, k, j] - rows.prefix[row, k, i] + rows.entry[row, k, i]
            for k, (i, j) in enumerate(edges)
        ]
        memory = [
            rows.kept[row, j] - rows.kept[row, i] + rows.working[row, i:j].max()
            + rows.in_flight[row, k] * (rows.activation[row, j] - rows.activation[row, i])
            for k, (i, j) in enumerate(edges)
        ]  # fmt: skip
        if all(used <= rows.capacity[row, k] for k, used in enumerate(memory)):
            best = min(best, sum(seconds) + rows.later[row] * max(seconds) + rows.fixed[row])
    return best


@pytest.mark.parametrize(
    ("stages", "room"), [(1, 2.2), (2, 1.5), (3, 1.5), (5, 1.3), (7, 1.3), (1, 9.0), (3, 9.0), (5, 9.0)]
)
def test_the_best_splits_equal_brute_force_over_all_splits(stages: int, room: float) -> None:
    rng = np.random.default_rng(stages)
    rows = random_rows(rng, 6, stages, 7, room=room)
    starts = np.ones(8, dtype=bool)
    if stages < 5:
        starts[4] = False
    found = best_splits(rows, starts)
    expected = [brute_force(rows, row, starts) for row in range(len(rows))]
    np.testing.assert_allclose(found.cost, expected, rtol=1e-12)
    assert np.isfinite(expected).any()
    for row in np.flatnonzero(np.isfinite(expected)):
        assert found.first_layers[row, 0] == 0
        assert starts[found.first_layers[row]].all()
        assert (np.diff([*found.first_layers[row], 7]) > 0).all()


def test_more_stages_than_layers_have_no_split() -> None:
    rows = random_rows(np.random.default_rng(0), 2, 4, 3, room=9.0)
    assert np.isinf(best_splits(rows, np.ones(4, dtype=bool)).cost).all()
