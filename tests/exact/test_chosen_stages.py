from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from darts_parallel.cost.evaluation import evaluate_batch
from darts_parallel.cost.hard_plans import HardPlans, even_uniform_plans
from darts_parallel.exact.chosen_stages import ChosenStages, balanced, balanced_plans
from tests.support.random_tables import random_table


@pytest.mark.parametrize("seed", range(4))
def test_no_split_has_a_shorter_longest_chunk(seed: int) -> None:
    table = random_table(seed, pp=3, num_layers=7, num_choices=2)
    plan = balanced(table, 0, 1)
    longest = float(_chunks(table, plan.first_layers[0].tolist()).max())
    cuts = [layer for layer in range(1, 7) if not bool(table.fused_to_previous[layer])]
    others = [_chunks(table, [0, *pair]).max() for pair in combinations(cuts, 2)]
    assert longest == pytest.approx(float(min(others)), rel=1e-12)


def _chunks(table, starts):  # type: ignore[no-untyped-def]
    ends = [*starts[1:], table.num_layers]
    kinds = table.stage_kind.tolist()
    return torch.stack(
        [table.time[0, q, a:b, 1].sum() for q, a, b in zip(kinds, starts, ends, strict=True)]
    )


@pytest.mark.parametrize("seed", range(5))
def test_seconds_synchronisation_and_memory_of_stages_are_those_of_evaluate(seed: int) -> None:
    table = random_table(seed, pp=3, num_layers=7, tightness=1.0)
    cuts = [layer for layer in range(1, 7) if not bool(table.fused_to_previous[layer])]
    pairs = list(combinations(cuts, 2))
    choices = torch.randint(
        len(table.choices), (1, 7), generator=torch.Generator().manual_seed(seed)
    )
    for outer in range(table.num_outer):
        starts = torch.tensor([[0, *pair] for pair in pairs])
        plans = HardPlans(torch.full((len(pairs),), outer), choices.expand(len(pairs), -1), starts)
        cost, stages = evaluate_batch(table, plans), ChosenStages.of(table, plans[:1])
        rows = np.stack([stages.segments.rows_of(split) for split in starts.tolist()])
        np.testing.assert_allclose(stages.seconds()[rows], cost.stage_seconds, rtol=1e-12)
        np.testing.assert_allclose(stages.sync()[rows], cost.sync_seconds, rtol=1e-12)
        fits = (cost.memory <= table.capacity).numpy()
        assert (stages.fits()[rows] == fits).all()
        fitting, seconds = stages.fitting()
        assert len(fitting) == len(seconds) == stages.fits().sum()
        refused = replace(stages.costs, kind_allowed=np.zeros_like(stages.costs.kind_allowed))
        assert np.isinf(ChosenStages(refused, stages.choices).seconds()).all()


def test_strategies_that_fit_come_first_and_the_lightest_where_none_does() -> None:
    table = random_table(5, pp=2, num_layers=6, num_choices=4, tightness=3.0)
    plans = balanced_plans(table, range(table.num_outer), count=1)
    assert plans.outer.tolist() == [
        o for o in range(table.num_outer) if bool(table.allowed[o].any())
    ]
    tiny = replace(table, capacity=table.capacity * 1e-3)
    both = balanced_plans(tiny, [0])
    even = even_uniform_plans(tiny)
    even = even[torch.nonzero(even.outer == 0).squeeze(1)]
    cost = evaluate_batch(tiny, even)
    peaks = (cost.memory / tiny.capacity).amax(1)
    wanted = [
        int(even.choices[int(row), 0]) for row in (cost.iteration_time.argmin(), peaks.argmin())
    ]
    assert both.choices[:, 0].tolist() == wanted
    assert balanced_plans(table, []) is None


def test_where_no_plan_fits_the_fastest_and_the_one_of_the_least_full_device_are_balanced() -> None:
    table = random_table(0, pp=2, num_layers=6, num_choices=3, num_outer=1)
    none, first = torch.zeros_like(table.static), (torch.arange(6) < 2).double().unsqueeze(1)
    static = torch.tensor([20.0, 9.0, 90.0]).double() * (
        first * torch.tensor([1, 0, 0]) + torch.tensor([0, 1, 1])
    )
    faster = {
        name: getattr(table, name) * torch.tensor([1.0, 1.0, 0.1])
        for name in ("forward", "backward")
    }
    same = {"capacity": torch.ones(2).double(), "allowed": torch.ones(1, 3, dtype=torch.bool)}
    bytes_ = {"static": static + none, "activation": none, "working": none}
    plans = balanced_plans(replace(table, **faster, **same, **bytes_), [0])
    assert plans.choices[:, 0].tolist() == [2, 1]
