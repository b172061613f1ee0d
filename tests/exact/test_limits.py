"""Limits of the exact search, worked out by loops over all splits, uses and strategies."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from darts_parallel.cost import OuterCosts
from darts_parallel.exact._stage_fronts import LayerStructure, end_penalties, penalties
from darts_parallel.exact.limits import Budgets, SegmentBounds
from tests.support.random_tables import random_table


def costs_of(seed: int, **given: int) -> OuterCosts:
    table = random_table(
        seed, pp=1 + seed % 3, num_layers=6, equal_layers=seed % 2 == 0, tightness=0.9, **given
    )
    return OuterCosts.read(table, 0)


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 6, 7, 8])  # two others have no plan
def test_a_sweep_keeps_what_a_loop_over_all_splits_keeps(seed: int) -> None:
    costs = costs_of(seed)
    bounds, rest = SegmentBounds.build(costs, "layerwise"), costs.num_micro_batches - 1.0
    columns = (bounds.stages.stage, bounds.stages.first, bounds.stages.end)
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    cuts = ([0, *inner, 6] for inner in combinations(range(1, 6), costs.pp - 1))
    splits = [[(k, *ends) for k, ends in enumerate(pairwise(cut))] for cut in cuts]
    splits = [[keys.index(key) for key in split] for split in splits if set(split) <= set(keys)]
    now, sums, sync = bounds.seconds, bounds.summed, bounds.sync
    total = [sums[s].sum() + rest * now[s].max() + sync[s].max() for s in splits]
    limit, expected = float(np.median(total)), {}
    for row, key in enumerate(keys):
        others = [[other for other in split if other != row] for split in splits if row in split]
        if not others:
            continue
        least = min(sums[s].sum() for s in others)
        slow, late = (min(x[s].max(initial=0.0) for s in others) for x in (now, sync))
        both, largest = max(late, sync[row]), rest * max(slow, now[row])
        if least + sums[row] + largest + both <= limit:
            left = limit - least - both  # for a time t and rest * max(t, slow)
            most = left - rest * slow if left <= (1 + rest) * slow else left / (1 + rest)
            room = limit - least - sums[row] - largest
            mixed = list(zip(bounds.mixed[:, row], bounds.rates, strict=True))
            seconds = max([now[row], *((value - room) / rate for value, rate in mixed)])
            expected[key] = (
                seconds,
                max(sums[row], seconds),
                max([sync[row], *(value - rate * most for value, rate in mixed)]),
            )
    found = bounds.within(limit, rest, rounds=1)
    assert list(zip(found.stages.stage, found.stages.first, found.stages.end, strict=True)) == list(
        expected
    )
    figures = np.stack([found.seconds, found.summed, found.sync], axis=1)
    np.testing.assert_allclose(figures, list(expected.values()), rtol=1e-12)
    assert len(bounds.within(limit, rest).stages) <= len(expected)


def test_the_sum_of_a_stage_holds_what_is_paid_once_an_iteration() -> None:
    costs = costs_of(0)
    costs = replace(costs, per_iteration=np.ones_like(costs.per_iteration))
    bounds = SegmentBounds.build(costs, "layerwise")
    layers = bounds.stages.end - bounds.stages.first
    np.testing.assert_allclose(bounds.summed, bounds.seconds + layers)


@pytest.mark.parametrize("seed", range(9))
def test_a_label_may_need_what_the_loosest_use_of_its_layers_leaves(seed: int) -> None:
    costs, rng = costs_of(seed), np.random.default_rng(seed)
    structure, stages = LayerStructure(costs), SegmentBounds.build(costs, "layerwise").stages
    signatures, of_stage = costs.stage_signatures
    for number, (kind, in_flight, capacity) in enumerate(signatures):
        forms, mine = structure.forms(number), np.flatnonzero(of_stage[stages.stage] == number)
        first, end, budgets = (
            stages.first[mine],
            stages.end[mine],
            rng.uniform(2, 9, (3, len(mine))),
        )
        limits = forms.limits(Budgets(first, end, budgets), structure.groups)
        kept = costs.static + in_flight * costs.activation
        for node in range(1, len(structure.trie.parent)):
            # beginning, end so far, end of the use, its number
            begun = np.argwhere(structure.trie.node == node)
            uses = [
                (i, e, end[u], u)
                for i, e in begun
                for u in np.flatnonzero((first == i) & (end >= e))
            ]
            assert limits.wanted[node] == bool(uses)
            assert limits.final[node] == any(e == j for _, e, j, _ in uses)
            if not uses:
                continue
            for form, (seconds, once, sync, price, _) in enumerate(forms.weights):
                value = (
                    seconds * costs.time[kind]
                    + once * costs.per_iteration
                    + sync * costs.sync[kind]
                )
                last, row = (
                    form - len(forms.weights),
                    [*budgets, np.zeros(len(mine))][forms.part[form]],
                )
                rest = (value + price * kept).min(axis=1)
                least = costs.working.min(axis=1)
                expected = max(
                    row[u] + price * capacity - rest[e:j].sum() - (last == -2) * least[i:j].max()
                    for i, e, j, u in uses
                )
                assert limits.limits[node, form] == pytest.approx(expected, rel=1e-9)
            labels = np.array([[1.0, 0.0, 2.0, bytes_, 0.5] for bytes_ in (3.0, 4.0)])
            times = [[1.0 * costs.num_micro_batches + 2.0] if costs.pp == 1 else [1.0, 3.0]] * 2
            expected_rows = np.concatenate([times, [[3.0, 0.5], [4.0, 0.5]]], axis=1)
            np.testing.assert_allclose(limits.compared(labels), expected_rows)


def test_a_penalty_is_the_most_that_one_layout_costs_above_another_whatever_follows() -> None:
    # layout 0 costs 1 or 4 with its successors, layout 1 costs 3 or 3.5; in another setting 0 or 0, 0.25 or 0
    rows = np.array([[[[1.0, 4.0], [3.0, 3.5]]], [[[0.0, 0.0], [0.25, 0.0]]]])
    assert penalties(rows).tolist() == [[[0.0, 0.5], [2.0, 0.0]]]
    # one that never costs more has no penalty
    assert penalties(rows + np.array([[0.0], [9.0]])).tolist() == [[[0.0, 0.0], [11.0, 0.0]]]


@pytest.mark.parametrize("seed", range(6))
def test_penalties_of_nodes_are_the_largest_of_their_segments(seed: int) -> None:
    costs = costs_of(seed, num_layouts=2)
    structure, count = LayerStructure(costs), costs.num_micro_batches
    for kind in range(len(costs.time)):
        before, inside = structure.entered(kind)
        for node in range(1, len(structure.trie.parent)):
            spots = np.argwhere(structure.trie.node == node)
            for a, b in ((0, 1), (1, 0)):
                enter = [
                    (costs.p2p[:, i - 1, :, a] - costs.p2p[:, i - 1, :, b]).max()
                    for i, _ in spots
                    if i
                ]
                leave = [
                    (costs.reshard[kind, e - 1, a] - costs.reshard[kind, e - 1, b]).max()
                    for _, e in spots
                    if e < 6
                ]
                assert before[node, a, b] == pytest.approx(max([0.0, *enter]))
                weight = count if costs.pp == 1 else 1
                assert inside[node, a, b] == pytest.approx(max([0.0, *leave]) * weight)
    end = end_penalties(costs)
    for place in range(7):
        for a, b in ((0, 1), (1, 0)):
            later = (
                costs.p2p[:, place - 1, a] - costs.p2p[:, place - 1, b]
                if 0 < place < 6
                else np.zeros(0)
            )
            assert end[place, a, b] == pytest.approx(count * later.max(initial=0.0))
