"""The last steps: whole stage boundaries, fresh logits, roundings that fit."""

from dataclasses import replace

import pytest
import torch

from darts_parallel.config import SearchConfig
from darts_parallel.cost import CostTable, HardPlans, evaluate_batch
from darts_parallel.gradient.descent import GradientSearch
from darts_parallel.gradient.relaxation import stage_edges, stage_widths
from darts_parallel.gradient.restarts import LEAST_WEIGHT
from darts_parallel.gradient.rounding import layer_kinds, round_counts, round_to_fit
from darts_parallel.gradient.settling import CONFIGURATIONS, STARTS, can_settle
from tests.support.random_tables import random_table

FEW = SearchConfig(num_steps=40, num_restarts=8, polish=False)


def alike(table: CostTable) -> CostTable:
    """Return the table with all layers like the first, and every strategy allowed everywhere."""
    names = ("forward", "backward", "weight_gradient", "sync", "per_iteration")
    names = (*names, "static", "activation", "working")
    fields = {}
    for name in names:
        values = getattr(table, name)
        fields[name] = values[..., :1, :].expand_as(values).contiguous()
    allowed = torch.ones_like(table.allowed)
    fused = torch.zeros_like(table.fused_to_previous)
    fields |= {"allowed": allowed, "fused_to_previous": fused}
    return replace(table, kind_allowed=None, **fields)


def settled_search(seed: int) -> GradientSearch:
    """Return a search of several configurations after its last step."""
    table = random_table(seed, pp=3, num_layers=9, num_choices=3, tightness=0.8)
    search = GradientSearch([alike(table)], "layerwise", FEW, seed)
    search.run()
    return search


@pytest.mark.parametrize("counts", [[3, 1, 4], [1, 1, 1, 1], [7], [5, 2]])
def test_widths_of_whole_stages_give_their_boundaries(counts: list[int]) -> None:
    size = sum(counts)
    widths = stage_widths(torch.tensor(counts).double(), size)
    expected = torch.tensor(counts).cumsum(0)[:-1].double()
    torch.testing.assert_close(stage_edges(widths, size), expected, rtol=0, atol=1e-9)


def test_after_the_last_boundary_step_boundaries_are_whole_and_logits_alone_are_learned() -> None:
    settled = 0
    for seed in range(6):
        search = settled_search(seed)
        assert search.settling_step == 34
        learned = {id(parameter) for parameter, _ in search.optimizer.parameters}
        for group in search.groups:
            settled += 1
            assert group.aims is not None
            assert 0.9 <= group.aims.min() <= group.aims.max() <= 1.0  # the plan must fit
            torch.testing.assert_close(group.edges, group.edges.round(), rtol=0, atol=1e-9)
            assert id(group.widths) not in learned
            assert id(group.logits) in learned
            assert group.logits.shape[1] * len(search.groups) <= len(STARTS)
        assert len(search.groups) <= CONFIGURATIONS
    assert settled >= 4


def test_no_strategy_begins_the_last_steps_without_weight() -> None:
    search = settled_search(0)
    (group,) = search.groups[:1]
    assert group.aims is not None
    group.averages = (torch.softmax(8.0 * group.logits.detach(), -1), group.edges)
    first = torch.tensor([0, 4, 6]).repeat(*group.logits.shape[:2], 1)
    group.settle(first, group.aims.squeeze(1))
    weights = group.logits.detach().exp()
    assert float(weights.min()) >= LEAST_WEIGHT * (1 - 1e-12)


def test_rounding_to_fit_rounds_every_expected_count_up_or_down_and_fits_more_often() -> None:
    fits = {round_counts: 0, round_to_fit: 0}
    for seed in range(30):
        table = random_table(seed, pp=2, num_layers=10, num_choices=3, num_outer=1, tightness=0.7)
        table = alike(table)
        rng = torch.Generator().manual_seed(seed)
        weights = torch.randn(1, 10, 3, generator=rng, dtype=torch.float64).softmax(-1)
        first = torch.tensor([[0, 5]])
        plans = HardPlans(torch.tensor([0]), weights.argmax(-1), first)
        # memory between what the lightest and what the heaviest strategy needs
        peaks = []
        for choice in range(3):
            uniform = replace(plans, choices=torch.full((1, 10), choice))
            peaks.append(evaluate_batch(table, uniform).memory[0])
        peak = torch.stack(peaks)
        table = replace(table, capacity=0.5 * (peak.amin(0) + peak.amax(0)))
        assert len(set(layer_kinds(table).tolist())) == 1
        for rule in fits:
            found = rule(weights, plans, table)
            for stage in (slice(0, 5), slice(5, 10)):
                expected = weights[0, stage].sum(0)
                counts = torch.bincount(found.choices[0, stage], minlength=3)
                assert bool(((counts - expected).abs() < 1.0 + 1e-6).all())
            fits[rule] += int(evaluate_batch(table, found).feasible)
    assert fits[round_to_fit] >= fits[round_counts] + 3


@pytest.mark.parametrize("kind", ["uniform", "stagewise"])
def test_spaces_whose_layers_do_not_mix_keep_moving_boundaries(kind: str) -> None:
    table = random_table(0, pp=2, num_layers=6)
    assert not can_settle([table], kind)
    assert GradientSearch([table], kind, FEW, 0).settling_step == FEW.num_steps
    assert can_settle([table], "layerwise")
    simulated = replace(table, pipeline=replace(table.pipeline, simulated=True))
    assert not can_settle([table, simulated], "layerwise")
