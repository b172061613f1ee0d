"""Splits of many plans at once against brute force over all splits."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from darts_parallel.exact._batched_splits import SplitProblems
from darts_parallel.exact.segments import StageSegments


def random_problems(seed: int, count: int, stages: int, layers: int, *, room: float) -> SplitProblems:
    """Draw plans without synchronisation, some of whose stages do not fit: about 1 in `room` and more."""
    rng, fused = np.random.default_rng(seed), np.zeros(layers, dtype=bool)
    fused[4:5] = stages < 5
    segments = StageSegments.legal(stages, fused)
    length = (segments.end - segments.first)[:, None]
    seconds = length * rng.uniform(0.5, 2.0, (len(segments), count))
    seconds[rng.uniform(0.0, room, seconds.shape) < 1.0 / stages] = np.inf
    later, fixed = rng.integers(0, 8, count).astype(float), rng.uniform(0.0, 1.0, count)
    return SplitProblems(segments, seconds, np.zeros(seconds.shape), later, fixed, np.full(count, np.inf))


def brute_force(problems: SplitProblems, row: int) -> float:
    """Return the least seconds of a plan over all contiguous splits."""
    segments = problems.segments
    keys = zip(segments.stage.tolist(), segments.first.tolist(), segments.end.tolist(), strict=True)
    known = dict(zip(keys, problems.seconds[:, row].tolist(), strict=True))
    best, layers = np.inf, segments.num_layers
    for inner in combinations(range(1, layers), segments.num_stages - 1):
        edges = enumerate(pairwise([0, *inner, layers]))
        seconds = [known.get((k, i, j), np.inf) for k, (i, j) in edges]
        if max(seconds) < np.inf:
            best = min(best, sum(seconds) + problems.later[row] * max(seconds) + problems.fixed[row])
    return best


@pytest.mark.parametrize(
    ("stages", "room"), [(1, 2.2), (2, 1.5), (3, 1.5), (5, 1.3), (7, 1.3), (1, 9.0), (3, 9.0), (5, 9.0)]
)
def test_the_best_splits_equal_brute_force_over_all_splits(stages: int, room: float) -> None:
    problems = random_problems(stages, 6, stages, 7, room=room)
    found = problems.best()
    expected = [brute_force(problems, row) for row in range(6)]
    np.testing.assert_allclose(found.cost, expected, rtol=1e-12)
    assert np.isfinite(expected).any()
    for row in np.flatnonzero(np.isfinite(expected)):
        assert found.first_layers[row, 0] == 0
        assert stages >= 5 or 4 not in found.first_layers[row]
        assert (np.diff([*found.first_layers[row], 7]) > 0).all()


def test_more_stages_than_layers_have_no_split() -> None:
    assert np.isinf(random_problems(0, 2, 4, 3, room=9.0).best().cost).all()
