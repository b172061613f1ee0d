"""Bounds of simulated pipelines against every plan of random small tables."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from darts_parallel.cost.choices import float_tensor
from darts_parallel.cost.cost_table import CostTable
from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.exact.bounds import outer_lower_bounds
from darts_parallel.exact.enumeration import brute_force
from darts_parallel.exact.simulated import packed_bound, simulated_lower_bound
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


def simulated(schedule: str, seed: int, tightness: float, count: int = 4) -> CostTable:
    """Return a random table of two devices under a schedule."""
    chunks = CHUNKS[schedule]
    flying = find(schedule).in_flight(2, count, chunks)
    table = random_table(
        seed, pp=2 * chunks, num_layers=6, num_choices=2, num_outer=1, tightness=tightness
    )
    table = replace(
        table,
        pipeline=PipelineModel(True, schedule, blocking=bool(seed % 2)),
        capacity=table.capacity[:2] * chunks,
        in_flight=float_tensor([flying]),
        num_micro_batches=torch.tensor([count]),
    )
    # stages of a device are of one kind
    return replace(table, stage_kind=table.stage_kind[:2][table.stage_device])


@pytest.mark.parametrize("schedule", CHUNKS)
def test_no_plan_is_below_a_bound(schedule: str) -> None:
    gaps = []
    for seed, tightness in ((0, 0.3), (1, 1.0)):
        table = simulated(schedule, seed, tightness, count=4 + 2 * seed)
        best = brute_force([table], "layerwise").cost
        work = float(outer_lower_bounds(table)[0])
        packed = packed_bound(table, 0)
        together = simulated_lower_bound([table], "layerwise")
        assert 0 < together <= best * (1 + 1e-12)
        assert together == max(work, packed)
        if best < float("inf"):
            gaps.append(best / together)
            known = 0.5 * together
            assert simulated_lower_bound([table], "layerwise", known=known) == known
    assert gaps
    assert max(gaps) < 2.0


def test_no_order_of_passes_is_below_the_bound_of_any_order() -> None:
    for schedule in ("1f1b", "zero_bubble_h1"):
        table = simulated(schedule, seed=0, tightness=1.0)
        free = replace(
            table, pipeline=replace(table.pipeline, free=True), before=0.5 * table.activation
        )
        best = brute_force([table], "layerwise").cost
        of_any = simulated_lower_bound([free], "layerwise")
        assert 0 < of_any <= simulated_lower_bound([table], "layerwise") <= best


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("seed", range(2))
def test_a_single_plan_of_one_stage_a_device_is_bounded_closely(schedule: str, seed: int) -> None:
    table = simulated(schedule, seed, tightness=1e9, count=6)
    joined = torch.tensor([False, True, True, False, True, True])
    table = replace(table.keep_choices([0]), fused_to_previous=joined)
    best = brute_force([table], "layerwise")
    assert best.plans_evaluated == 1
    assert 0.8 * best.cost <= simulated_lower_bound([table], "layerwise") <= best.cost


def test_devices_wait_for_the_first_layers_and_then_work() -> None:
    given = simulated("interleaved", seed=0, tightness=1e9)
    seconds = {
        "forward": 1,
        "backward": 2,
        "weight_gradient": 1,
        "sync": 0,
        "per_iteration": 0,
        "p2p": 0,
    }
    same = {name: torch.full_like(getattr(given, name), value) for name, value in seconds.items()}
    table = replace(given, **same)
    # 6 layers of 4 x 3 seconds on two devices, of which the second waits for one forward pass
    assert packed_bound(table, 0) == pytest.approx(3 * 12 + 1)
    assert float(outer_lower_bounds(table)[0]) == pytest.approx(6 * 12 / 2 + 1 / 2)


def test_some_device_holds_two_of_three_expensive_layers() -> None:
    given = simulated("interleaved", seed=0, tightness=1e9)
    free = {
        name: torch.zeros_like(getattr(given, name))
        for name in ("forward", "weight_gradient", "sync", "per_iteration", "p2p")
    }
    layers = torch.tensor([5.0, 0.1, 5.0, 0.1, 5.0, 0.1], dtype=torch.float64)
    backward = layers.view(-1, 1).expand_as(given.backward[0, 0]).expand_as(given.backward)
    table = replace(given, **free, backward=backward)
    # four micro-batches of two layers, where an even share of the work is less
    assert packed_bound(table, 0) == pytest.approx(4 * 2 * 5.0)
    assert float(outer_lower_bounds(table)[0]) == pytest.approx(4 * layers.sum().item() / 2)


def test_a_device_that_must_save_memory_pays_for_it() -> None:
    given = simulated("interleaved", seed=0, tightness=1e9)
    nothing = {
        name: torch.zeros_like(getattr(given, name))
        for name in ("forward", "weight_gradient", "sync", "per_iteration", "p2p", "activation")
    }
    # of both strategies one is slow, the other one needs ten bytes in a layer
    backward = torch.tensor([3.0, 1.0], dtype=torch.float64).expand_as(given.backward)
    static = torch.tensor([0.0, 10.0], dtype=torch.float64).expand_as(given.static)
    table = replace(given, **nothing, backward=backward, static=static, kind_allowed=None)
    fast, slow = 4 * 3 * 1.0, 4 * 3 * 3.0
    bounds = []
    for capacity in (30.0, 15.0, 0.0):
        room = torch.full((2,), capacity, dtype=torch.float64)
        bounds.append(packed_bound(replace(table, capacity=room), 0))
    assert bounds == pytest.approx([fast, (fast + slow) / 2, slow])
    assert np.all(np.diff(bounds) > 0)
