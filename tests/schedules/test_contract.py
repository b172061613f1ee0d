"""The contract of every schedule, whatever its file says."""

import numpy as np
import pytest

from darts_parallel.cost.schedule_graph import compiled
from darts_parallel.schedules import NAMES, Schedule, find
from darts_parallel.schedules._block import BuildingBlock, held, move_together, repeated
from darts_parallel.schedules.v_half import SCHEDULE as V_HALF
from darts_parallel.schedules.v_min import SCHEDULE as V_MIN
from tests.support.event_queue import event_queue_ends

SCHEDULES = [
    (find(name), chunks)
    for name in NAMES
    for chunks in ([find(name).chunks] if find(name).chunks else [2, 3])
]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("pp", "count"), [(1, 2), (2, 4), (3, 9), (4, 8)])
def test_every_micro_batch_passes_every_stage(
    schedule: Schedule, chunks: int, pp: int, count: int
) -> None:
    places, kinds = schedule.devices(pp, pp * chunks), "FBW" if schedule.split else "FB"
    assert sorted(places) == sorted(chunks * list(range(pp)))
    orders = schedule.orders(pp, count, chunks)
    found = [entry for order in orders for entry in order]
    assert len(found) == len(set(found))
    assert set(found) == {
        (k, s, b) for k in kinds for s in range(pp * chunks) for b in range(count)
    }
    for device, order in enumerate(orders):
        assert {places[entry.stage] for entry in order} == {device}
        ranks = {entry: place for place, entry in enumerate(order)}
        weights = [entry for entry in order if entry.kind == "W"]
        assert all(ranks[entry] > ranks[entry._replace(kind="B")] for entry in weights)
    # nobody waits for itself
    assert len(compiled.__wrapped__(schedule.name, pp, count, chunks)) == len(found)


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (5, 14)])
def test_zb_h2_waits_for_the_first_forward_passes_alone(pp: int, count: int) -> None:
    rule, seconds = find("zero_bubble_h2"), {"F": [1.0] * pp, "B": [1.2] * pp, "W": [0.8] * pp}
    assert max(rule.in_flight(pp, count, 1)) == 2 * pp - 1
    ends, _ = event_queue_ends(rule.orders(pp, count), seconds, [0.0] * (pp - 1))
    assert max(ends) == pytest.approx(3 * count + pp - 1)
    usual, _ = event_queue_ends(find("zero_bubble_h1").orders(pp, count), seconds, [0.0] * (pp - 1))
    assert max(usual) > max(ends)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_for_which_a_schedule_is_not_defined_are_refused_with_one_for_which_it_is(
    name: str,
) -> None:
    schedule = find(name)
    for pp in (2, 3, 4):
        for count in range(1, 12):
            _, near = schedule.count_rule(pp, count)
            assert schedule.count_refusal(pp, near) is None
            assert (schedule.count_refusal(pp, count) is None) == (near == count)
    for chunks in (1, 2, 3):
        sentence = schedule.chunk_refusal(chunks)
        assert (
            sentence is None
            or schedule.chunk_refusal(int(sentence.split("try ")[1].rstrip("."))) is None
        )


@pytest.mark.parametrize("schedule", [V_HALF, V_MIN])
@pytest.mark.parametrize("pp", [3, 4, 7])
def test_passes_that_move_together_run_and_are_held_no_longer(
    schedule: BuildingBlock, pp: int
) -> None:
    slots = repeated(schedule, pp, 2 * pp)
    before = [{entry: time for time, entry in row.items()} for row in slots.rows]
    counts = [held(row) for row in slots.rows]
    most = max(int(row.max()) for row in counts)
    move_together(slots, counts, [-1] * pp)
    for row, times in zip(slots.rows, before, strict=True):
        assert len(row) == len(times)
        assert all(time <= times[entry] for time, entry in row.items())
        assert held(row).max() <= most


@pytest.mark.parametrize(
    ("name", "pp", "count", "bubble", "most"),
    [
        ("zero_bubble_v_late", 4, 4, 0.125, 8),
        ("zero_bubble_v_late", 8, 8, 0.146, 16),
        ("zero_bubble_v", 8, 15, 0.078, 16),
        ("zero_bubble_v_late", 16, 16, 0.157, 32),
        ("v_half", 8, 16, 0.285, 10),
        ("v_half", 16, 32, 0.329, 18),
    ],
)
def test_bubbles_and_memory_on_a_v_are_those_published(
    name: str, pp: int, count: int, bubble: float, most: int
) -> None:
    schedule = find(name)
    orders = schedule.orders(pp, count, 2)
    seconds = {"F": [1.0] * 2 * pp, "B": [1.0] * 2 * pp, "W": [1.0] * 2 * pp}
    ends, _ = event_queue_ends(orders, seconds, [0.0] * (2 * pp - 1))
    assert max(ends) / (6 * count) - 1.0 <= bubble
    for order in orders:
        changes = [(kind == "F") - (kind == "W") for kind, _, _ in order]
        assert np.cumsum(changes).max() <= most


@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_late_weights_take_no_longer_than_pytorchs_order_and_no_more_memory(pp: int) -> None:
    seconds = {kind: [1.0] * 2 * pp for kind in "FBW"}
    message = [0.0] * (2 * pp - 1)
    for count in range(1, 2 * pp + 1):
        own = find("zero_bubble_v_late").orders(pp, count, 2)
        usual = find("zero_bubble_v").orders(pp, count, 2)
        assert max(event_queue_ends(own, seconds, message)[0]) <= max(
            event_queue_ends(usual, seconds, message)[0]
        )
        for order in own:
            assert (
                np.cumsum([(one.kind == "F") - (one.kind == "W") for one in order]).max() <= 2 * pp
            )


SPLIT = [(schedule, chunks) for schedule, chunks in SCHEDULES if schedule.split]


@pytest.mark.parametrize(("schedule", "chunks"), SPLIT)
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (3, 9), (4, 5)])
def test_moments_are_those_at_which_a_device_holds_most(
    schedule: Schedule, chunks: int, pp: int, count: int
) -> None:
    _, count = schedule.count_rule(pp, count)
    last = pp * chunks - 1
    shares, of_last = set(), {(0, 0)}
    for order in schedule.orders(pp, count, chunks):
        before = between = 0
        held = []
        own = [0, 0]
        for kind, stage, _ in order:
            before += {"F": 1, "B": -1, "W": 0}[kind]
            between += {"F": 0, "B": 1, "W": -1}[kind]
            held.append((before, between))
            if stage == last:
                own[0] += {"F": 1, "B": -1, "W": 0}[kind]
                own[1] += {"F": 0, "B": 1, "W": -1}[kind]
                of_last.add((own[0], own[1]))
        most = max(map(sum, held))
        shares |= {(early / most, late / most) for early, late in held}
    moments = schedule.fullest_moments(pp, count, chunks)
    for growth in (1.0, 1.2, 2.0, 10.0):  # bytes between the parts of a backward pass
        largest = max(early + growth * late for early, late in shares)
        assert max(early + growth * late for early, late in moments) == pytest.approx(largest)
    assert all(any(np.allclose(moment, share) for share in shares) for moment in moments)
    assert set(map(tuple, schedule.last_stage_moments(pp, count, chunks))) == of_last
