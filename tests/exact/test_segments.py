from itertools import combinations, pairwise

import numpy as np
import pytest

from darts_parallel.exact import segments
from darts_parallel.exact.result import DeadlineError, Verification
from darts_parallel.exact.segments import StageSegments
from darts_parallel.plans.strategy import LayerStrategy, Plan


@pytest.mark.parametrize("seed", range(8))
def test_programs_over_segments_equal_a_look_at_every_split(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, layers = int(rng.integers(1, 6)), int(rng.integers(6, 12))
    fused = np.append(False, rng.random(layers - 1) < 0.15)
    every = StageSegments.legal(stages, fused)
    segments = every.keep(rng.random(len(every)) < 0.9)
    values = rng.random(len(segments))
    known = dict(
        zip(zip(segments.stage, segments.first, segments.end, strict=True), values, strict=True)
    )
    splits = [[0, *cut] for cut in combinations(np.flatnonzero(~fused)[1:].tolist(), stages - 1)]
    rows = {
        tuple(s): [
            known.get(row, np.inf) for row in zip(range(stages), s, [*s[1:], layers], strict=True)
        ]
        for s in splits
    }
    sums = {split: sum(row) for split, row in rows.items()}
    maxima = {split: max(row) for split, row in rows.items()}
    assert segments.least_sum(values) == pytest.approx(
        min(sums.values(), default=np.inf), rel=1e-12
    )
    assert segments.least_maximum(values) == min(maxima.values(), default=np.inf)
    before, after = segments.before(values, np.add), segments.after(values, np.add)
    # every plan meets one boundary after each stage
    through = (before + after)[1:-1].min(axis=1)
    np.testing.assert_allclose(through, segments.least_sum(values), rtol=1e-12)
    limits = list(segments.rising_limits(values))
    possible = sorted(v for v in values.tolist() if v >= segments.least_maximum(values))
    assert limits == possible
    for limit in limits[::5]:
        total, starts = segments.split_below(values, limit)
        within = [split for split in sums if maxima[split] <= limit]
        assert total == pytest.approx(min(sums[split] for split in within), rel=1e-12)
        assert sums[tuple(starts)] == pytest.approx(total, rel=1e-12)
        assert values[segments.rows_of(starts)].sum() == pytest.approx(total, rel=1e-12)
    alone = [segments.split_below(values, limit) for limit in limits]
    if limits:
        assert segments.splits_below(values, limits) == alone
    assert not any(
        later < before * 1.1 for before, later in pairwise(segments.rising_limits(values, 0.1))
    )
    assert segments.split_below(values, -1.0) == (np.inf, [])


def test_every_stage_has_a_layer_and_begins_where_it_may() -> None:
    legal = StageSegments.legal(3, np.array([False, False, True, False, False]))
    found = set(zip(legal.stage.tolist(), legal.first.tolist(), legal.end.tolist(), strict=True))
    # layers 1 and 2 are one unit
    assert found == {(0, 0, 1), (0, 0, 3), (1, 1, 3), (1, 1, 4), (1, 3, 4), (2, 3, 5), (2, 4, 5)}


def test_more_segments_than_may_be_are_refused_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = np.zeros(6, dtype=bool)
    for most in (30, 29):  # 3 stages of 1 to 4 layers, 10 places of each
        monkeypatch.setattr(segments, "MAX_SEGMENTS", most)
        if most == 30:
            assert len(StageSegments.legal(3, free)) <= most
    with pytest.raises(DeadlineError):
        StageSegments.legal(3, free)


def test_a_gap_is_relative_to_a_plan_of_the_method() -> None:
    strategy = LayerStrategy(tp=1, dp=1)
    plan = Plan(num_micro_batches=1, boundaries=(0, 1), layers=(strategy,))
    assert Verification("own", plan, 2.0).with_gap(3.0).gap == 0.5
    assert np.isnan(Verification("none", None, np.inf).with_gap(3.0).gap)
