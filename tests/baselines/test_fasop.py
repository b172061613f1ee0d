from itertools import pairwise

import numpy as np
import pytest

from baselines.fasop import fasop_plans, first_partition, minmax_partition, solve
from darts_parallel.cost import Index
from darts_parallel.cost.evaluation import evaluate_batch
from tests.support.random_tables import random_table


@pytest.mark.parametrize("seed", range(12))
def test_plans_on_random_tables_are_legal_and_one_for_each_uniform_strategy(seed: int) -> None:
    table = random_table(seed, pp=1 + seed % 4, num_layers=7)
    plans = fasop_plans(table)
    assert len(plans) == int(table.allowed.sum())
    assert (plans.choices == plans.choices[:, :1]).all()
    assert (plans.first_layers[:, 0] == 0).all()
    assert (plans.first_layers.diff(dim=1) > 0).all()
    assert not table.fused_to_previous[plans.first_layers].any()
    best = solve([table])
    cost = evaluate_batch(table, plans)
    feasible = cost.iteration_time[cost.feasible]
    assert best.cost == (float(feasible.min()) if len(feasible) else float("inf"))


def test_the_remainder_goes_to_the_last_stage_and_then_to_the_first_ones() -> None:
    assert first_partition(14, 4).tolist() == [4, 3, 3, 4]
    assert first_partition(15, 4).tolist() == [4, 4, 3, 4]


def _times(ticks: Index, kinds: Index, counts: list[int]) -> list[int]:
    edges = np.cumsum([0, *counts])
    return [
        int(ticks[k, b] - ticks[k, a]) for k, (a, b) in zip(kinds, pairwise(edges), strict=True)
    ]


def _descend(ticks: Index, kinds: Index, comm: Index) -> tuple[list[int], list[int]]:
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


def _random_chain(rng: np.random.Generator) -> tuple[Index, Index]:
    """Prefix sums of a chain on two types, and the types of the stages of four placements."""
    layers = int(rng.integers(2, 11))
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
