"""Rounding of stage boundaries: every boundary stays next to its relaxed place, and none does better."""

from itertools import product

import torch

from darts_parallel.cost import CostTable, HardPlans, unit_starts
from darts_parallel.gradient.boundary_rounding import Rounding, merits
from darts_parallel.gradient.rounding import round_counts
from tests.support.random_tables import random_table


def relaxed(seed: int) -> tuple[CostTable, Rounding]:
    """Return a random table, and a random relaxed plan of its second row."""
    table = random_table(seed, pp=4, num_layers=10, num_choices=3, tightness=0.8)
    rng = torch.Generator().manual_seed(seed)
    weights = torch.rand(table.num_layers, 3, generator=rng, dtype=torch.float64)
    weights = weights / weights.sum(1, keepdim=True)
    last = len(unit_starts(table.fused_to_previous)) - 1
    edges = 0.5 + last * torch.rand(3, generator=rng, dtype=torch.float64).sort().values
    return table, Rounding(table, 1, weights, edges)


def searched(rounding: Rounding) -> tuple[HardPlans, float]:
    """Return the best plan of the search, and its merit."""
    plans, found = rounding.descend()
    return plans[:1], float(found[0])


def enumerated(table: CostTable, rounding: Rounding) -> torch.Tensor:
    """Return the merits of all plans whose boundaries lie next to the relaxed ones."""
    units = unit_starts(table.fused_to_previous)
    sides = [(int(edge), int(edge) + 1) for edge in rounding.edges.tolist()]
    rising = [(0, *places) for places in product(*sides)]
    rising = [row for row in rising if list(row) == sorted(set(row)) and row[-1] < len(units)]
    if not rising:
        return torch.empty(0)
    first = units[torch.tensor(rising)]
    weights = rounding.weights.expand(len(first), -1, -1)
    outer = torch.full((len(first),), rounding.outer)
    plans = round_counts(weights, HardPlans(outer, weights.argmax(-1), first), table)
    return merits(table, plans)


def test_no_rounding_of_the_boundaries_is_better() -> None:
    best = compared = 0
    for seed in range(60):
        table, rounding = relaxed(seed)
        every = enumerated(table, rounding)
        if not len(every):
            continue
        plan, merit = searched(rounding)
        assert float(merits(table, plan)[0]) == merit
        compared += 1
        best += merit <= float(every.min()) + 1e-9
    # a local search: single moves and moves of neighbours may miss the best one
    assert compared >= 40
    assert best >= 0.9 * compared


def test_boundaries_stay_next_to_their_relaxed_places() -> None:
    moved = 0
    for seed in range(40):
        table, rounding = relaxed(seed)
        edges = rounding.edges
        if bool((edges.floor().diff() < 1).any()):
            continue  # too close to be rounded one by one
        plan, _ = searched(rounding)
        units = unit_starts(table.fused_to_previous)
        places = torch.searchsorted(units, plan.first_layers[0])[1:]
        assert bool(((places - edges).abs() <= 1.0).all())
        moved += not places.equal(edges.round().long())
    assert moved


def test_a_plan_of_one_stage_is_rounded_by_counts_alone() -> None:
    table = random_table(0, pp=1, num_layers=6, num_choices=3)
    weights = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    plan, merit = searched(Rounding(table, 0, weights, torch.empty(0, dtype=torch.float64)))
    assert plan.first_layers.tolist() == [[0]]
    assert float(merits(table, plan)[0]) == merit
