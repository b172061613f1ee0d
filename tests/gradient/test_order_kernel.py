"""Moves and rules of the order kernel, one call at a time, against plain Python."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from darts_parallel.cost import unit_starts
from darts_parallel.gradient import _order_kernel as kernel
from darts_parallel.gradient.orders import Order, OrderProblem
from darts_parallel.gradient.rounding import moved_boundaries
from tests.gradient.test_orders import first_plan, free_table

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


def drawn(state: int) -> float:
    """Return a number of xorshift64* (Vigna 2016), worked out without overflow."""
    x = state
    x ^= x >> 12
    x = (x ^ x << 25) % 2**64
    x ^= x >> 27
    STATES.append(x)
    return (x * 2685821657736338717 % 2**64 >> 11) / 2**53


STATES: list[int] = []


def test_random_numbers_are_those_of_the_paper() -> None:
    state = np.array([88172645463325252], dtype=np.uint64)
    for _ in range(5):
        before = int(state[0])
        assert kernel.draw(state) == drawn(before)
        assert int(state[0]) == STATES[-1]
    draws = [kernel.below(5, state) for _ in range(500)]
    assert min(np.bincount(draws, minlength=5)) > 50
    assert sum(kernel.coin(state) for _ in range(500)) in range(200, 300)


class Replay:
    """An order, run pass by pass: what its devices could begin at any time."""

    def __init__(self, problem: OrderProblem, stages: Any, words: Any) -> None:
        self.figures = problem.figures[True]
        self.stages = stages
        self.number = problem.table.num_stages
        self.place = problem.table.stage_device.tolist()
        self.words = [list(word) for word in words]
        self.ends: dict[tuple[int, int], float] = {}
        self.ran = Counter[int]()
        self.free = [0.0] * len(words)
        self.held = [0.0] * len(words)
        self.backward_last = [False] * len(words)

    def arrival(self, symbol: int) -> float:
        """Return when the next pass of a symbol has its input; infinite where nobody sent it."""
        batch = self.ran[symbol]
        kind, stage = divmod(symbol, self.number)
        if batch == self.figures.batches:
            return np.inf
        if kind == 2:
            return 0.0 if batch < self.ran[symbol - self.number] else np.inf
        if symbol == 0:
            return 0.0
        source = symbol - 1 if kind == 0 else symbol + 1
        if kind == 1 and stage == self.number - 1:
            source = stage
        return self.ends.get((source, batch), np.inf) + float(self.stages.message[symbol])

    def ready(self, device: int) -> dict[int, float]:
        """Return forward and input-gradient passes by symbol, and when a device can begin them."""
        found = {}
        for symbol in range(2 * self.number):
            if self.place[symbol % self.number] == device and np.isfinite(self.arrival(symbol)):
                found[symbol] = max(self.arrival(symbol), self.free[device])
        return found

    def roomy(self, symbol: int, device: int) -> bool:
        """Return whether a pass leaves a forward pass its room in the later stages of the device."""
        more = self.stages.more
        later = range(symbol + 1, self.number)  # none behind a backward pass
        spared = max([0.0, *(more[s] for s in later if self.place[s] == device)])
        return bool(self.held[device] + more[symbol] + spared <= self.stages.room[device])

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield device and symbol of every pass, in the order in which passes begin, before it runs."""
        while any(self.words):
            begins = []
            for device, word in enumerate(self.words):
                if word:
                    begin = max(self.arrival(word[0]), self.free[device])
                    begins.append((begin, device, word[0]))
            begin, device, symbol = min(begins)
            assert np.isfinite(begin)
            yield device, symbol
            self.words[device].pop(0)
            self.free[device] = begin + float(self.stages.seconds[symbol])
            self.ends[symbol, self.ran[symbol]] = self.free[device]
            self.ran[symbol] += 1
            self.held[device] += float(self.stages.more[symbol])
            if symbol < 2 * self.number:
                self.backward_last[device] = symbol >= self.number


@pytest.mark.parametrize(("schedule", "pp"), [("zero_bubble_h1", 3), ("zero_bubble_v", 2)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tightness", [0.5, 8.0])
def test_the_heuristic_runs_what_its_policy_puts_first(
    schedule: str, pp: int, seed: int, tightness: float
) -> None:
    table = free_table(seed, schedule, pp, 5, tightness=tightness)
    problem, plan = OrderProblem(table, 0, "layerwise"), first_plan(table)
    first = np.append(plan.first_layers[0].numpy(), table.num_layers)
    none = np.zeros((0, 0), dtype=np.int64)
    stages, _ = problem.stages(Order(problem, none, none, first, plan.choices[0].numpy(), True))
    stages.room[:] = np.maximum(stages.room, 1.2 * stages.more[: table.num_stages].sum())
    number = table.num_stages
    for values in product(range(3), (0.0, 0.5, 1.0), (False, True)):
        policy = kernel.Policy(*values)
        words, lengths = kernel.dispatch(problem.figures[True], stages, policy)
        if tightness < 1 and not lengths.any():  # too little memory for the weights' gradients
            continue
        assert lengths.tolist() == [3 * 5 * number // pp] * pp
        replay = Replay(problem, stages, words)
        for device, symbol in replay.run():
            ready = replay.ready(device)
            roomy = {own: when for own, when in ready.items() if replay.roomy(own, device)}
            short = any(own < number and own not in roomy for own in ready)
            least = min(roomy.values(), default=np.inf)
            same = [own for own, when in roomy.items() if when <= least + 1e-12]
            forward = [own for own in same if own < number]
            backward = [own for own in same if own >= number]
            ahead = policy.priority == 1 or (policy.priority == 2 and replay.backward_last[device])
            best = max(forward) if forward and policy.deep_first else min(forward, default=-1)
            if not forward or (backward and not ahead):
                best = min(backward, default=-1)
            weights = [
                own
                for own in range(2 * number, 3 * number)
                if replay.place[own % number] == device and np.isfinite(replay.arrival(own))
            ]
            if weights:
                idle = least - replay.free[device]
                waits = idle > policy.gap * stages.seconds[max(weights)]
                makes_room = short and best >= number and policy.gap < 1
                if best < 0 or waits or makes_room:
                    best = max(weights)
            assert symbol == best
