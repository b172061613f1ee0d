from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from baselines.fasop import TICK, Floats, Integers, first_partition, minmax_partition
from darts_parallel.errors import ConfigError
from experiments.fasop.cases import GPT2_XL, NODES_OF_8, study_clusters
from experiments.fasop.costs import memory_bytes
from experiments.fasop.improve import better_plans, num_orders, placements_of, refine
from experiments.fasop.partition import exact_heads, exact_partition, exact_tails
from experiments.fasop.program import FasopPlan, price, program_plans
from experiments.fasop.recurrence import stage_ends
from experiments.fasop.setting import Degrees, count_strategies, cyclic_placements, enumerate_degrees
from tests.support.fasop_tiny import cost_model, job, without_memory


def test_the_pareto_study_has_the_80_clusters_and_31362_strategies_that_fasop_counts() -> None:
    clusters = [counts for group in study_clusters() for counts in group]
    assert len(clusters) == 80
    assert sum(count_strategies(GPT2_XL, NODES_OF_8, counts) for counts in clusters) == 31362


def test_degrees_use_all_gpus_and_divide_the_batch() -> None:
    for degrees in enumerate_degrees(job(6, batch=12), 4, 3):
        assert degrees.tp * degrees.dp * degrees.pp == 12
        assert degrees.num_micro_batches(job(6, batch=12)) * degrees.dp * degrees.micro_batch_size == 12
        assert degrees.pp <= 6
        assert degrees.tp in (1, 2, 4)


def test_placements_rotate_the_sorted_nodes() -> None:
    assert cyclic_placements((1, 2)).tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 1]]
    assert cyclic_placements((0, 3)).tolist() == [[1, 1, 1]]
    assert len(placements_of((3, 3), few=20)) == num_orders((3, 3)) == 20
    assert len(placements_of((3, 3), few=19)) == 6


def test_two_stages_with_sends_end_as_worked_out_by_hand() -> None:
    # forward 1 s, backward 2 s; 0.5 s forward, 0.25 s back, two micro-batches:
    # stage 0: F 0-1, sent 1.5, F -2.5, sent 3; B 4.75-6.75; B 8-10
    # stage 1: F 1.5-2.5, B -4.5, sent 4.75; F -5.75, B -7.75, sent 8
    ends = stage_ends(np.array([[3.0, 3.0]]), np.array([0.5]), np.array([0.25]), 2)
    assert ends.tolist() == [[10.0, 7.75]]


def _reference(seconds: Floats, send: float, back: float, count: int) -> list[float]:
    """The recurrence event by event, as a definition."""
    stages = len(seconds)
    warm = [min(stages - i - 1, count) for i in range(stages)]

    @lru_cache(None)
    def forward(i: int, j: int) -> float:
        arrived = sent(i - 1, j) if i else 0.0
        return max(arrived, free(i, j)) + seconds[i] / 3

    def free(i: int, j: int) -> float:
        if j <= warm[i]:
            return sent(i, j - 1) if j else 0.0
        return returned(i, j - warm[i] - 1)

    @lru_cache(None)
    def sent(i: int, j: int) -> float:
        peer = forward(i + 1, j - 1) if 1 <= j < min(warm[i], warm[i + 1]) else 0.0
        return max(forward(i, j), peer) + (send if i == 0 else 0.0)

    @lru_cache(None)
    def backward(i: int, j: int) -> float:
        begin = returned(i + 1, j) if i < stages - 1 else 0.0
        if j < count - warm[i]:
            begin = max(begin, forward(i, j + warm[i]))
        elif j:
            begin = max(begin, returned(i, j - 1))
        return begin + 2 * seconds[i] / 3

    @lru_cache(None)
    def returned(i: int, j: int) -> float:
        if i == 0:
            return backward(0, j)
        above = i - 1
        if j < count - warm[above]:
            peer = forward(above, j + warm[above])
        else:
            peer = backward(above, j - 1) if j else 0.0
        return max(backward(i, j), peer) + (back if i == stages - 1 else 0.0)

    return [backward(i, count - 1) for i in range(stages)]


@pytest.mark.parametrize("seed", range(30))
def test_the_scan_equals_the_recurrence_event_by_event(seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(2, 8)), int(rng.integers(1, 11))
    seconds = rng.uniform(0.1, 1.0, (3, stages)) * rng.choice([1.0, 8.0], (3, stages))
    send, back = rng.uniform(0.0, 2.0, 3), rng.uniform(0.0, 2.0, 3)
    ends = stage_ends(seconds, send, back, count)
    for row in range(3):
        expected = _reference(seconds[row], float(send[row]), float(back[row]), count)
        np.testing.assert_allclose(ends[row], expected, rtol=1e-12)


def test_equal_stages_without_sends_take_the_closed_form_of_1f1b() -> None:
    ends = stage_ends(np.full((1, 4), 3.0), np.zeros(1), np.zeros(1), 8)
    assert ends[0, 0] == pytest.approx((8 + 4 - 1) * 3.0)


def test_the_remainder_goes_to_the_last_stage_and_then_to_the_first_ones() -> None:
    assert first_partition(14, 4).tolist() == [4, 3, 3, 4]
    assert first_partition(15, 4).tolist() == [4, 4, 3, 4]


def _times(ticks: Integers, kinds: Integers, counts: list[int]) -> list[int]:
    edges = np.cumsum([0, *counts])
    return [int(ticks[k, b] - ticks[k, a]) for k, (a, b) in zip(kinds, pairwise(edges), strict=True)]


def _descend(ticks: Integers, kinds: Integers, comm: Integers) -> tuple[list[int], list[int]]:
    """FASOP's heuristic one step at a time."""
    counts, seen, last = first_partition(ticks.shape[1] - 1, len(kinds)).tolist(), [], None
    while True:
        times = [t + int(c) for t, c in zip(_times(ticks, kinds, counts), comm, strict=True)]
        worst = max(times)
        if last is not None and (worst > last[0] or (worst == last[0] and counts in seen)):
            return last[1], last[1]
        slow, fast = times.index(worst), times.index(min(times))
        moved = counts.copy()
        moved[slow] -= 1
        moved[fast] += 1
        if slow in (0, len(kinds) - 1) and counts[slow] == 2:
            added = counts.copy()
            added[slow] += 1
            added[fast] -= 1
            return (counts if last is None else added), counts
        if counts[slow] <= 1:
            return counts, counts
        seen.append(counts)
        last, counts = (worst, counts), moved


def _random_chain(rng: np.random.Generator, least: int = 2) -> tuple[Integers, Integers]:
    """Prefix sums of a chain on two types, and the types of the stages of four placements."""
    layers = int(rng.integers(least, 11))
    stages = int(rng.integers(1, layers + 1))
    times = rng.integers(0, int(rng.choice([3, 1000])), (2, layers)) + 1
    return np.pad(times.cumsum(1), ((0, 0), (1, 0))), rng.integers(0, 2, (4, stages))


@pytest.mark.parametrize("seed", range(40))
def test_the_batched_heuristic_equals_the_stepwise_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ticks, kinds = _random_chain(rng)
    comm = rng.integers(0, 3, kinds.shape)
    reported, priced = minmax_partition(ticks, kinds, comm)
    for row in range(len(kinds)):
        expected = _descend(ticks, kinds[row], comm[row])
        assert (reported[row].tolist(), priced[row].tolist()) == expected
    assert (priced >= 1).all()
    assert (priced.sum(1) == ticks.shape[1] - 1).all()


def _best_bottleneck(ticks: Integers, kinds: Integers) -> int:
    layers = ticks.shape[1] - 1
    splits = combinations(range(1, layers), len(kinds) - 1)
    parts = ([b - a for a, b in pairwise((0, *cuts, layers))] for cuts in splits)
    return min(max(_times(ticks, kinds, counts)) for counts in parts)


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_partition_has_the_bottleneck_of_brute_force(seed: int) -> None:
    ticks, kinds = _random_chain(np.random.default_rng(seed))
    counts = exact_partition(ticks, kinds)
    assert (counts >= 1).all()
    assert (counts.sum(1) == ticks.shape[1] - 1).all()
    for row in range(len(kinds)):
        assert max(_times(ticks, kinds[row], counts[row].tolist())) == _best_bottleneck(ticks, kinds[row])


@pytest.mark.parametrize("seed", range(10))
def test_heads_and_tails_are_exact_partitions_of_part_of_the_stages(seed: int) -> None:
    ticks, kinds = _random_chain(np.random.default_rng(seed), least=4)
    stages = kinds.shape[1]
    heads, tails = (found(ticks, kinds, range(1, stages + 1)) for found in (exact_heads, exact_tails))
    for width in range(1, stages + 1):
        for row, types in enumerate(kinds):
            for counts, part in ((heads[width], types[:width]), (tails[width], types[stages - width :])):
                slowest = max(_times(ticks, part, counts[row].tolist()))
                assert slowest == _best_bottleneck(ticks, part)


def test_a_small_strategy_costs_what_a_hand_calculation_says(tmp_path: Path) -> None:
    # 6 layers of 3 ms (A100) and 6 ms (A10) for forward and backward, micro-batches of 2: twice that
    model = cost_model(tmp_path, blocks=4)
    batch = model.batch(Degrees(2, 1, 2, 2), np.array([[0, 1]]))
    counts = np.array([[4, 2]])
    assert batch.num_micro_batches == 2
    np.testing.assert_allclose(batch.stage_ticks(counts) * TICK, [[4 * 0.006, 2 * 0.012]])
    p2p = 2 * 32 * 64 * 16 / (40e9 / 2 / 1.05)
    np.testing.assert_allclose(batch.p2p, [[p2p]])
    # stage 0 has the embedding and three blocks; its two ranks share a node of two GPUs
    parameters = 64 * 100 + 3 * (12 * 64**2 + 20800)
    sync = parameters * 16 / 1800e9
    np.testing.assert_allclose(batch.sync_seconds(counts, model.job), [[sync, sync]])
    embedding = 64 * 100 * 16 / (40e9 / 2)
    np.testing.assert_allclose(batch.embedding_sync, [embedding])
    # 24 ms in both stages: 8 ms forward, 16 ms backward; every send waits for nobody
    end = 0.008 + p2p + 0.024 + p2p + 0.024 + p2p + 0.016
    assert price(batch, counts, model).seconds[0] == pytest.approx(end + sync + embedding)


def test_memory_is_what_a_hand_calculation_says(tmp_path: Path) -> None:
    model = cost_model(tmp_path, blocks=4)
    batch = model.batch(Degrees(2, 2, 1, 2), np.array([[0, 1]]))
    block = 12 * 64**2 / 2 * 18 + 32 * 2 * 2 * 64 * (10 + 24 / 2 + 5 * 4 * 32 / (64 * 2))
    embedding = 64 * 100 / 2 * 18 + 32 * 2 * 64 * 2 * 2 / 2
    post = 64 * 100 / 2 * 18 + 4 * 32 * 2 * (64 + 100) / 2
    expected = [[1.10 * (embedding + 2 * block), 1.10 * (2 * block + post)]]
    np.testing.assert_allclose(memory_bytes(batch, np.array([[3, 3]]), model.job), expected)


def _check(plan: FasopPlan, layers: int, counts: tuple[int, ...], *, halves: bool) -> None:
    degrees = plan.degrees
    assert degrees.tp * degrees.dp * degrees.pp == 2 * sum(counts)
    assert len(plan.layers_per_stage) == degrees.pp
    assert sum(plan.layers_per_stage) == layers
    assert min(plan.layers_per_stage) >= 1
    assert tuple(np.bincount(plan.placement, minlength=2)) == counts
    if halves and degrees.pp > 1:
        assert layers // 2 in np.cumsum(plan.layers_per_stage)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_our_plan_is_legal_and_never_slower_than_fasops(tmp_path: Path, seed: int, halves: bool) -> None:
    model = cost_model(tmp_path, blocks=8, seed=seed, halves=halves)
    clusters = [(1, 3), (2, 2), (0, 4)]
    theirs = program_plans(model, clusters)
    for few in (1, 20):
        for counts, their, our in zip(
            clusters, theirs, better_plans(model, clusters, few_placements=few), strict=True
        ):
            assert their is not None
            assert our is not None
            _check(our, 10, counts, halves=halves)
            _check(their, 10, counts, halves=halves)
            assert our.seconds <= their.seconds * (1 + 1e-12)
            again = price(
                model.batch(our.degrees, np.array([our.placement])), np.array([our.layers_per_stage]), model
            )
            assert again.seconds[0] == pytest.approx(our.seconds, rel=1e-12)
            assert again.fits[0]


@pytest.mark.parametrize("seed", range(4))
def test_our_plan_is_within_one_percent_of_brute_force(tmp_path: Path, seed: int) -> None:
    model = cost_model(tmp_path, blocks=5, seed=seed, batch=4)
    counts = (1, 2)
    best = np.inf
    for degrees in enumerate_degrees(model.job, 2, 3):
        cuts = list(combinations(range(1, 7), degrees.pp - 1))
        edges = np.array([(0, *cut, 7) for cut in cuts])
        for placement in placements_of(counts, few=3):
            batch = model.batch(degrees, np.tile(placement, (len(cuts), 1)))
            priced = price(batch, np.diff(edges, axis=1), model)
            best = min(best, float(np.where(priced.fits, priced.seconds, np.inf).min()))
    our = better_plans(model, [counts])[0]
    assert our is not None
    assert best * (1 - 1e-12) <= our.seconds <= best * 1.01


def test_refining_never_makes_a_step_slower(tmp_path: Path) -> None:
    model = cost_model(tmp_path, blocks=10, seed=0)
    batch = model.batch(Degrees(1, 1, 1, 8), placements_of((2, 2), few=6))
    start = price(batch, np.tile(first_partition(12, 8), (len(batch), 1)), model)
    better = refine(start, model)
    assert (better.seconds <= start.seconds).all()
    assert (better.seconds < start.seconds * 0.95).any()


def test_a_cluster_that_nothing_fits_has_no_plan(tmp_path: Path) -> None:
    model = without_memory(cost_model(tmp_path, blocks=4))
    assert program_plans(model, [(1, 1)]) == [None]
    assert better_plans(model, [(1, 1)]) == [None]


def test_a_profile_with_other_layers_is_refused_with_one_sentence(tmp_path: Path) -> None:
    model = cost_model(tmp_path, blocks=4)
    model.job = job(5)
    with pytest.raises(ConfigError, match=r"has 6 layers at tp=1, which must be 7; try 7\."):
        program_plans(model, [(1, 1)])
