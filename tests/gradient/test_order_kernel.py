"""Moves and rules of the order kernel, one call at a time, against plain Python."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from darts_parallel.cost import unit_starts
from darts_parallel.gradient import _order_kernel as kernel
from darts_parallel.gradient.orders import OrderProblem
from darts_parallel.gradient.rounding import moved_boundaries
from tests.gradient.test_orders import free_table

STATE = np.array([7], dtype=np.uint64)


def outcomes(word: list[int], place: int, other: int) -> Iterator[tuple[int, ...]]:
    """Every word that a move of one pass may give."""
    first, second = word[place], word[other]
    swapped = list(word)
    swapped[place], swapped[other] = second, first
    yield tuple(swapped)
    moved = list(word)
    moved.insert(other, moved.pop(place))
    yield tuple(moved)
    at = [i for i, symbol in enumerate(word) if symbol == first]
    to = [i for i, symbol in enumerate(word) if symbol == second]
    ahead = to.index(other) - at.index(place)
    for begin in range(len(at)):
        several = list(word)
        for number in range(begin, len(at)):
            if not 0 <= number + ahead < len(to):
                continue
            one, two = at[number], to[number + ahead]
            if (one < two) == (place < other):
                several[one], several[two] = second, first
        yield tuple(several)


@pytest.mark.parametrize("seed", range(5))
def test_a_pass_changes_places_with_another_one_or_goes_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    word = rng.permutation(np.repeat(np.arange(3), 4)).tolist()
    place = int(rng.integers(12))
    others = [i for i in range(12) if word[i] != word[place] and abs(i - place) <= 6]
    other = int(rng.choice(others))
    found = Counter()
    for _ in range(400):
        changed = np.array(word)
        kernel.move_pass(changed, place, other, STATE)
        found[tuple(changed.tolist())] += 1
    assert set(found) == set(outcomes(word, place, other))
    # all micro-batches in 30 % of the moves, and one pass in the others
    single = sum(found[word_] for word_ in set(list(outcomes(word, place, other))[:2]))
    assert single >= 0.6 * 400


@pytest.mark.parametrize("seed", range(4))
def test_moved_stages_begin_with_the_next_unit_and_keep_one(seed: int) -> None:
    table = free_table(seed, "zero_bubble_v", 2, 4)
    fused = np.zeros(table.num_layers, dtype=bool)
    fused[[2, 5]] = True
    units = unit_starts(torch.from_numpy(fused)).tolist()
    number = table.num_stages
    rng = np.random.default_rng(seed)
    places = [0, *sorted(rng.choice(np.arange(1, len(units)), number - 1, replace=False).tolist())]
    figures = SimpleNamespace(fused_to_previous=fused, stage_kind=table.stage_kind.numpy())
    legal = []
    for step in (1, -1):
        for low in range(1, number):
            for high in range(low, number):
                first = np.array([*(units[unit] for unit in places), table.num_layers])
                kept = kernel.shift_boundaries.py_func(
                    figures, first, low, high, step, table.num_layers
                )
                wanted = [unit + step * (low <= k <= high) for k, unit in enumerate(places)]
                assert kept == all(one < two for one, two in pairwise([*wanted, len(units)]))
                if kept:
                    assert first[:-1].tolist() == [units[unit] for unit in wanted]
                    legal.append(wanted)
    assert sorted(legal) == sorted(moved_boundaries(torch.tensor(places), len(units)).tolist())


@pytest.mark.parametrize("space", ["uniform", "stagewise", "layerwise"])
def test_a_move_of_layers_changes_one_stage_or_boundaries_next_to_it(space: str) -> None:
    problem = OrderProblem(free_table(1, "zero_bubble_v", 2, 4), 0, space)
    figures = problem.figures[True]._replace(fused_to_previous=np.zeros(12, dtype=bool))
    before, drawn = np.array([0, 3, 6, 9, 12]), np.array([0, 1, 2, 0])
    strategies = np.repeat(drawn, 3)
    edges, found = set(), set()
    for _ in range(600):
        first, choices = before.copy(), strategies.copy()
        if not kernel.move_layers(figures, first, choices, 1, STATE):
            continue
        edges.add(tuple((first - before).tolist()))
        if (first == before).all():
            found.add(tuple(choices.tolist()))
        else:
            followed = np.repeat(drawn, np.diff(first)) if space == "stagewise" else strategies
            assert choices.tolist() == followed.tolist()
    # the second stage gives or takes a unit at either end; those behind it may pass it on
    ends = {(0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 1, 1, 0)}
    ends |= {tuple(-step for step in row) for row in ends}
    whole, single = set(), set()
    for choice in range(3):
        whole.add((0, 0, 0, *(3 * [choice]), 2, 2, 2, 0, 0, 0))
        for layer in (3, 4, 5):
            single.add(tuple(np.where(np.arange(12) == layer, choice, strategies).tolist()))
    wanted = {"uniform": set(), "stagewise": whole, "layerwise": single}[space]
    assert found == wanted
    assert edges == ends | ({(0, 0, 0, 0, 0)} if wanted else set())
