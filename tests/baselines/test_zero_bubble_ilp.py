from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from baselines.zero_bubble_ilp import FixedStages, best_order

Order = tuple[tuple[str, int], ...]


def orders_of(count: int, room: int) -> Iterator[Order]:
    """Every order of a device's passes in which micro-batches keep theirs and at most `room` are held."""

    def grow(done: dict[str, int], so_far: Order) -> Iterator[Order]:
        if len(so_far) == 3 * count:
            yield so_far
        for kind, before in (("F", count), ("B", done["F"]), ("W", done["B"])):
            held = done["F"] - done["W"] + (kind == "F")
            if done[kind] < before and held <= room:
                yield from grow({**done, kind: done[kind] + 1}, (*so_far, (kind, done[kind])))

    yield from grow({"F": 0, "B": 0, "W": 0}, ())


def makespan(stages: FixedStages, orders: Sequence[Order]) -> float:
    """Seconds of one stage a device in given orders; infinite where they wait for each other."""
    ends: dict[tuple[str, int, int], float] = {}
    clock, place, last = [0.0] * len(orders), [0] * len(orders), len(orders) - 1
    length = {"F": stages.forward, "B": stages.backward, "W": stages.weight}
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while place[device] < len(order):
                kind, batch = order[place[device]]
                ready = 0.0
                if kind == "F" and device:
                    ready = ends.get(("F", device - 1, batch), np.inf) + stages.message[device - 1]
                elif kind == "B" and device < last:
                    ready = ends.get(("B", device + 1, batch), np.inf) + stages.message[device]
                if not np.isfinite(ready):
                    break
                clock[device] = max(clock[device], ready) + length[kind][device]
                ends[kind, device, batch] = clock[device]
                place[device], moved = place[device] + 1, True
    if any(p < len(order) for p, order in zip(place, orders, strict=True)):
        return float("inf")
    return max(end + after for end, after in zip(clock, stages.after, strict=True))


@pytest.mark.parametrize(("seed", "room"), [(0, 3), (1, 2), (2, 1)])
def test_the_programme_finds_the_order_that_trying_all_finds(seed: int, room: int) -> None:
    rng, count = np.random.default_rng(seed), 3
    times = rng.uniform(0.5, 2.0, (3, 2))
    stages = FixedStages(
        *times,
        rng.uniform(0.0, 0.3, 1),
        (0, 1),
        rng.uniform(0.0, 0.5, 2),
        np.ones(2),
        np.full(2, room),
        count,
    )
    single = list(orders_of(count, room))
    best = min(makespan(stages, pair) for pair in product(single, repeat=2))
    found = best_order(stages, 20.0, 1.3 * best)
    assert found.seconds <= found.bound * (1 + 1e-4)
    assert found.seconds == pytest.approx(best, rel=1e-6)
