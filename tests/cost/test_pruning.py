"""Strategies that no plan needs, by a look at every pair of them."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.cost import CostTable
from darts_parallel.cost.pruning import without_dominated
from tests.support.random_tables import random_table

SECONDS = ("forward", "backward", "weight_gradient", "sync")
OTHERS = ("per_iteration", "static", "activation", "working")


def coarse_table(seed: int, simulated: bool) -> CostTable:
    """A table of few different figures, so that strategies are often equal or worse."""
    table = random_table(seed, pp=2, num_layers=4, num_choices=6, num_layouts=2, num_outer=2)
    rng = torch.Generator().manual_seed(seed)
    fields = {}
    for name in (*SECONDS, *OTHERS):
        values = getattr(table, name)
        usual = (torch.rand(6, generator=rng) < 0.25).double().expand_as(values)
        other = torch.rand(values.shape, generator=rng) < 0.005
        other[..., 2, :] = torch.rand(6, generator=rng) < 0.05
        fields[name] = torch.where(other, 1.0 - usual, usual).double()
    fields["backward"] = fields["backward"] + fields["weight_gradient"]
    # runs of equal layers
    fields = {name: values[..., [0, 1, 1, 2], :] for name, values in fields.items()}
    allowed = torch.rand(2, 6, generator=rng) < 0.8
    runs = torch.rand(table.forward.shape[1], 6, generator=rng) < 0.9
    # the last strategy costs what the second one costs
    index = torch.tensor([0, 1, 2, 3, 4, 1])
    fields = {name: values[..., index] for name, values in fields.items()}
    allowed, runs, layout = allowed[:, index], runs[:, index], table.layout[index]
    pipeline = replace(table.pipeline, simulated=simulated)
    return replace(
        table, **fields, allowed=allowed, kind_allowed=runs, layout=layout, pipeline=pipeline
    )


def beats(table: CostTable, one: int, other: int) -> bool:
    """Return whether a strategy can take the place of another one everywhere."""
    assert table.kind_allowed is not None
    if table.layout[one] != table.layout[other]:
        return False
    for legal in (table.allowed, table.kind_allowed):
        if (legal[:, other] & ~legal[:, one]).any():
            return False
    time = table.forward + table.backward
    if table.pipeline.simulated:
        first = table.backward - table.weight_gradient
        seconds = [table.forward, first, table.weight_gradient, table.sync]
    else:
        seconds = [time, time + table.sync]
    figures = [*seconds, *(getattr(table, name) for name in OTHERS)]
    return all(bool((values[..., one] <= values[..., other]).all()) for values in figures)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_strategy_is_dropped_where_another_one_is_no_worse_in_anything(simulated: bool) -> None:
    dropped = 0
    for seed in range(80):
        table = coarse_table(seed, simulated)
        kept = []
        for choice in range(6):
            better = [
                other
                for other in range(6)
                if other != choice
                and beats(table, other, choice)
                # of equal ones the first is kept
                and (other < choice or not beats(table, choice, other))
            ]
            if not better:
                kept.append(choice)
        dropped += 6 - len(kept)
        assert without_dominated(table).choices == tuple(table.choices[c] for c in kept)
    assert dropped > 60


@pytest.mark.parametrize("name", ["forward", "activation", "sync"])
def test_a_strategy_that_is_better_in_one_layer_alone_stays(name: str) -> None:
    table = random_table(0, pp=2, num_layers=5, num_choices=2, num_layouts=1, num_outer=1)
    table = replace(table, allowed=torch.ones(1, 2, dtype=torch.bool), kind_allowed=None)
    worse = {}
    for own in (*SECONDS, *OTHERS):
        values = getattr(table, own).clone()
        values[..., 1] = values[..., 0] + 0.1
        worse[own] = values
    table = replace(table, **worse)
    assert without_dominated(table).choices == table.choices[:1]
    for layer in range(5):
        better = worse[name].clone()
        better[..., layer, 1] -= 0.5
        assert without_dominated(replace(table, **{name: better})).choices == table.choices
