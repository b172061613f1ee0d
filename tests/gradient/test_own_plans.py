"""How the descent ends: falling learning rates, room for rounding, the best rounded restart."""

import pytest
import torch

from darts_parallel.config import SearchConfig
from darts_parallel.cost import evaluate_batch
from darts_parallel.gradient.adam import Adam
from darts_parallel.gradient.descent import GradientSearch
from darts_parallel.gradient.relaxation import SETTLING_RATE
from darts_parallel.gradient.relaxed_cost import SurrogateCost
from darts_parallel.gradient.restarts import RestartBatch
from tests.support.random_tables import random_table

FEW = SearchConfig(num_steps=40, num_restarts=8, polish=False)


def descended(seed: int) -> GradientSearch:
    """Return a search after its last step."""
    table = random_table(seed, pp=4, num_layers=12, num_choices=4, tightness=0.7)
    search = GradientSearch([table], "layerwise", FEW, seed)
    search.run()
    return search


def test_no_restart_has_a_rounded_plan_that_fits_and_is_faster_than_the_repaired_one() -> None:
    compared = 0
    for seed in range(12):
        search = descended(seed)
        if not search.merits:
            continue
        _, repaired = search.own_plans()
        for group in search.groups:
            table = search.pool.tables[group.table_index]
            cost = evaluate_batch(table, group.average_plans())
            for seconds in cost.iteration_time[cost.feasible].tolist():
                assert repaired.fits
                assert repaired.iteration_time_s <= seconds * (1 + 1e-12)
                compared += 1
    assert compared > 50


def test_a_step_has_the_learning_rate_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    step = Adam.step

    def recorded(self: Adam, scale: float = 1.0) -> None:
        scales.append(scale)
        step(self, scale)

    monkeypatch.setattr(Adam, "step", recorded)
    descended(0)
    # they fall twice: while boundaries move, and at whole boundaries
    for part in (scales[:34], scales[34:]):
        assert part == sorted(part, reverse=True)
        assert part[-1] < 0.2 * part[0]
    assert (scales[0], scales[34]) == (1.0, SETTLING_RATE)


@pytest.mark.parametrize(("share", "grows"), [(0.96, False), (0.985, True), (1.0, True)])
def test_multipliers_grow_before_the_memory_is_full(share: float, grows: bool) -> None:
    table = random_table(0, pp=2, num_layers=6, num_choices=3)
    rng = torch.Generator().manual_seed(0)
    rows = torch.arange(table.num_outer)
    batch = RestartBatch.initial(table, "layerwise", FEW, rng, 0, rows)
    size = batch.multipliers.shape
    seconds = torch.ones(size[:2], dtype=torch.float64)
    memory = share * table.capacity.expand(size)
    batch.loss(SurrogateCost(seconds, memory, memory, seconds, table.capacity), FEW)
    assert bool((batch.multipliers > 0).all()) == grows
