"""Bounds of simulated pipelines against every plan of random small tables."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.pipeline import PipelineModel, in_flight
from darts_parallel.exact._chain import Chain, DeviceCosts, FoldedSplits, weights_behind
from darts_parallel.exact.bounds import outer_lower_bounds
from darts_parallel.exact.simulated import (
    _mixture,
    brute_force,
    chain_bound,
    device_bound,
    folded_splits,
    packed_bound,
    simulated_lower_bound,
)
from darts_parallel.schedules import find
from tests.support.random_tables import random_table

CHUNKS = {
    "1f1b": 1,
    "zero_bubble_h1": 1,
    "interleaved": 2,
    "zero_bubble_v": 2,
    "v_half": 2,
    "v_min": 2,
}


def simulated(
    seed: int, schedule: str, *, pp: int = 2, count: int = 4, **given: object
) -> CostTable:
    chunks = CHUNKS[schedule]
    table = random_table(seed, pp=pp * chunks, num_layers=6, num_choices=2, num_outer=1, **given)  # type: ignore[arg-type]
    counts = torch.tensor([count])
    model = PipelineModel(True, schedule, blocking=bool(seed % 2))
    held = in_flight(pp, counts, schedule, chunks)
    # stages of a device are of one kind
    table = replace(
        table,
        pipeline=model,
        capacity=table.capacity[:pp] * chunks,
        in_flight=held,
        num_micro_batches=counts,
    )
    return replace(table, stage_kind=table.stage_kind[:pp][table.stage_device])


def optimum(table: CostTable) -> float:
    return brute_force([table], "layerwise").cost


@pytest.mark.parametrize("schedule", CHUNKS)
def test_no_plan_is_below_a_bound(schedule: str) -> None:
    infeasible, gaps = 0, []
    for seed in range(2):
        table = simulated(seed, schedule, count=4 + 2 * (seed == 1), tightness=(0.3, 1.0)[seed % 2])
        best, chain = optimum(table), chain_bound(table, 0, rounds=6)
        infeasible += best == float("inf")
        packed = packed_bound(table, 0)
        found = [float(outer_lower_bounds(table)[0]), chain, packed]
        if CHUNKS[schedule] == 2:
            limit = min(2.0 * best, 1e3)
            anyhow = replace(
                table, pipeline=replace(table.pipeline, free=True)
            )  # in whatever order
            found += [device_bound(anyhow, 0, limit), device_bound(table, 0, limit)]
            assert device_bound(table, 0, 0.5 * found[-1]) == pytest.approx(0.5 * found[-1])
        if find(schedule).folded:
            # among the splits that a fast plan can have, the game has the same optimum or a dearer one
            few = folded_splits(table, 0, limit)
            found.append(min(limit, chain_bound(table, 0, rounds=4, splits=few)))
        assert all(0 < bound <= best * (1 + 1e-12) for bound in found)
        together = simulated_lower_bound([table], "layerwise", known=best, seconds=1e3)
        assert 0.95 * min(max(found), best) <= together <= best
        gaps += [best / together] * (best < float("inf"))
    assert infeasible < 2
    assert np.median(gaps) < 1.5


def test_two_rounds_are_bounded_by_the_best_of_all_splits() -> None:
    rng = np.random.default_rng(0)
    own = [
        DeviceCosts(*np.pad(rng.random((3, 2, 6)), ((0, 0), (0, 0), (1, 0))).cumsum(-1))
        for _ in "ab"
    ]
    every = [
        max(
            (d.first[:, j] - d.first[:, i] + d.ways[:, i] + d.second[:, n] - d.second[:, k]).max()
            for d, (i, j, k, n) in zip(own, ((0, a, turn, b), (a, turn, b, 6)), strict=True)
        )
        for a, turn, b in combinations(range(1, 6), 3)
    ]
    assert FoldedSplits.in_rounds(1e3, np.ones(7, dtype=bool), own, np.inf) == pytest.approx(
        min(every)
    )


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("seed", range(2))
def test_where_there_is_one_plan_paths_prove_almost_its_seconds(schedule: str, seed: int) -> None:
    stages, counts = 2 * CHUNKS[schedule], torch.tensor([6])
    table = random_table(
        seed, pp=stages, num_layers=stages + 1, num_choices=1, num_layouts=1, num_outer=1
    )
    joined = torch.arange(stages + 1) == stages  # as many units as stages: one split
    model = PipelineModel(True, schedule, blocking=bool(seed % 2))
    held = in_flight(2, counts, schedule, CHUNKS[schedule])
    table = replace(
        table,
        pipeline=model,
        capacity=torch.full_like(table.capacity[:2], 1e30),
        in_flight=held,
        num_micro_batches=counts,
        fused_to_previous=joined,
    )
    table = replace(table, stage_kind=table.stage_kind[:2][table.stage_device])
    best = optimum(table)
    assert 0.9 * best <= chain_bound(table, 0) <= best
    # no known plan cuts a bound that is too large
    assert 0.9 * best <= simulated_lower_bound([table], "layerwise", seconds=1e3) <= best


def test_regret_matching_finds_the_mixture_of_a_matrix_game() -> None:
    # rock, paper, scissors with a win of rock that counts twice: shares 1/4, 1/2, 1/4
    game = np.array([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]])
    rows = _mixture(game)
    assert rows.sum() == pytest.approx(1.0)
    assert (rows @ game).min() > -0.01
    rng = np.random.default_rng(0)
    for _ in range(5):
        payoff = rng.normal(size=(6, 4))
        shares, columns = _mixture(payoff), _mixture(-payoff.T)
        assert (shares @ payoff).min() >= (payoff @ columns).max() - 0.02


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "zero_bubble_v", "v_half", "v_min"])
def test_weights_behind_the_last_backward_are_those_of_the_whole_order(schedule: str) -> None:
    for pp, count in ((2, 9), (4, 17)):
        expected = np.zeros(pp * CHUNKS[schedule])
        for order in find(schedule).orders(pp, count, CHUNKS[schedule]):
            last = max(place for place, entry in enumerate(order) if entry.kind == "B")
            np.add.at(expected, [entry.stage for entry in order[last:] if entry.kind == "W"], 1)
        assert np.array_equal(weights_behind(schedule, pp, count), expected)
        assert expected.sum() > 0


@pytest.mark.parametrize(("seed", "messages"), [(0, [[0], [1], [2]]), (1, [[0], [8], [8]])])
def test_a_devices_paths_take_the_messages_to_its_first_pass_and_back(
    seed: int, messages: object
) -> None:
    # of the second device: the way there, or also back; blocking ones lengthen its 4 passes each way
    paths = Chain.read(simulated(seed, "1f1b"), 0).devices_paths()
    assert [row.tolist() for _, row in paths] == messages


def test_devices_wait_for_the_first_layers_and_then_work() -> None:
    given = simulated(0, "interleaved", tightness=1e9)
    told = {
        "forward": 1,
        "backward": 2,
        "weight_gradient": 1,
        "sync": 0,
        "per_iteration": 0,
        "p2p": 0,
    }
    table = replace(
        given, **{name: 0 * getattr(given, name) + value for name, value in told.items()}
    )
    # 6 layers of 4 x 3 seconds on two devices, of which the second waits for one forward pass
    assert [packed_bound(table, 0), device_bound(table, 0, 1e3)] == pytest.approx(
        [3 * 12 + 1, 3 * 12 + 2]
    )
    assert float(outer_lower_bounds(table)[0]) == pytest.approx(6 * 12 / 2 + 1 / 2)
