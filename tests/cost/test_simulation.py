from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from darts_parallel.cost.simulation import PassSeconds, device_ends, timeline
from darts_parallel.errors import UnsupportedError
from darts_parallel.schedules import NAMES, Schedule, find
from tests.support.event_queue import event_queue_ends

CASES = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]
FOLDED = [name for name in NAMES if find(name).folded]
V_CASES = [(schedule, 2) for schedule in FOLDED]


def random_passes(seed: int, stages: int, plans: int = 3, message: float = 0.3) -> PassSeconds:
    rng = torch.Generator().manual_seed(seed)

    def rand(count: int) -> Tensor:
        return torch.rand(plans, count, generator=rng, dtype=torch.float64)

    backward = 0.2 + rand(stages)
    return PassSeconds(
        0.1 + rand(stages), backward, backward * rand(stages), message * rand(stages - 1)
    )


def equal_passes(stages: int, forward: float, backward: float, weight: float = 0.0) -> PassSeconds:
    one = torch.ones(1, stages, dtype=torch.float64)
    return PassSeconds(
        forward * one, backward * one, weight * one, torch.zeros(1, stages - 1).double()
    )


def reference(passes: PassSeconds, schedule: str, pp: int, count: int, plan: int) -> list[float]:
    chunks = passes.forward.shape[1] // pp
    weight = passes.weight_gradient[plan] if find(schedule).split else torch.zeros(1)
    seconds = {
        "F": passes.forward[plan].tolist(),
        "B": (passes.backward[plan] - weight).tolist(),
        "W": weight.tolist(),
    }
    orders = find(schedule).orders(pp, count, chunks)
    return event_queue_ends(orders, seconds, passes.message[plan].tolist())[0]


@pytest.mark.parametrize(("schedule", "chunks"), CASES + V_CASES)
@pytest.mark.parametrize("seed", range(6))
def test_the_recursion_is_an_event_queue_on_random_pipelines(
    schedule: str, chunks: int, seed: int
) -> None:
    rng = Random(seed)
    pp = rng.randint(1, 5)
    # short pipelines, and long ones of which only a part is simulated
    count = rng.choice([1, 2, 3, 5, 11, 60, 97]) * (pp if schedule == "interleaved" else 1)
    count = max(count, 2 * pp) if schedule == "dualpipe" else count
    passes = random_passes(seed, pp * chunks, message=rng.choice([0.0, 0.1, 3.0]))
    ends = device_ends(passes, schedule, pp, count)
    for plan in range(len(ends)):
        assert ends[plan].tolist() == pytest.approx(
            reference(passes, schedule, pp, count, plan), rel=1e-11
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("zero_bubble_v", 2), ("v_min", 2)],
)
def test_nearly_equal_stages_are_exact_over_many_micro_batches(
    schedule: str, chunks: int, seed: int
) -> None:
    # nearly equal bottlenecks take longest to settle
    noise = random_passes(seed, 4 * chunks, plans=1, message=0.0)
    even = equal_passes(4 * chunks, 1.0, 2.0, 1.0)
    passes = PassSeconds(
        even.forward + 1e-6 * noise.forward,
        even.backward + 1e-6 * noise.backward,
        even.weight_gradient,
        even.message,
    )
    expected = reference(passes, schedule, 4, 400, 0)
    assert device_ends(passes, schedule, 4, 400)[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 7, 40])
def test_equal_stages_take_exactly_the_closed_forms(pp: int, groups: int) -> None:
    count, forward, backward, weight = groups * pp, 1.0, 2.0, 1.0
    flush = (count + pp - 1) * (forward + backward)
    for schedule in ("1f1b", "gpipe"):
        passes = equal_passes(pp, forward, backward, weight)
        assert float(device_ends(passes, schedule, pp, count).max()) == flush
    # ZB-H1: a bubble of (pp - 1) (T_F + T_B - T_W), Qi et al. 2023
    split = count * (forward + backward) + (pp - 1) * (forward + backward - 2 * weight)
    assert float(device_ends(passes, "zero_bubble", pp, count).max()) == split
    for chunks in (2, 4):
        # Narayanan et al. 2021, section 2.2.2
        interleaved = (count + (pp - 1) / chunks) * (forward + backward)
        passes = equal_passes(pp * chunks, forward / chunks, backward / chunks)
        assert float(device_ends(passes, "interleaved", pp, count).max()) == interleaved


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize("count", [8, 120])
def test_gradients_equal_finite_differences(schedule: str, chunks: int, count: int) -> None:
    passes = random_passes(5, 4 * chunks, plans=1)
    parts = [passes.forward, passes.backward, passes.weight_gradient, passes.message]
    inputs = [part.clone().requires_grad_() for part in parts]
    weights = torch.tensor([0.3, 1.0, 0.2, 0.7], dtype=torch.float64)

    def loss(*given: Tensor) -> Tensor:
        return device_ends(PassSeconds(*given), schedule, 4, count) @ weights

    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_the_timeline_holds_every_pass_once_and_ends_when_the_devices_do(
    schedule: str, chunks: int
) -> None:
    passes = random_passes(3, 4 * chunks, plans=1)
    events = timeline(passes, schedule, torch.zeros(4), 12)
    orders = find(schedule).orders(4, 12, chunks)
    assert {event.operation for event in events} == {
        operation for order in orders for operation in order
    }
    assert len(events) == sum(len(order) for order in orders)
    for device, end in enumerate(device_ends(passes, schedule, 4, 12)[0].tolist()):
        mine = [event for event in events if event.device == device]
        assert [event.operation for event in mine] == list(orders[device])
        assert all(a.end <= b.start for a, b in pairwise(mine))
        assert mine[-1].end == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 24), (5, 9), (8, 16)])
def test_behind_its_last_forward_a_block_runs_backwards_before_weights(pp: int, count: int) -> None:
    for schedule, most in (("v_half", 2.5), ("v_min", 4.0)):
        line = timeline(equal_passes(2 * pp, 1.0, 2.0, 1.0), schedule, torch.zeros(pp), count)
        given = {
            ("B", e.operation.stage - 1, e.operation.micro_batch): e.end
            for e in line
            if e.operation.kind == "B"
        }
        last = {e.device: e.end for e in line if e.operation.kind == "F"}
        for device in range(pp):
            mine = [e for e in line if e.device == device and e.start >= last[device]]
            waiting = [
                (given[e.operation], e.start)
                for e in mine
                if tuple(e.operation) in given and e.operation.kind == "B"
            ]
            for weight in (e for e in mine if e.operation.kind == "W"):
                assert not [b for b in waiting if b[0] <= weight.start < b[1]]
        # a bubble of the fill and the drain alone: passes of equal seconds repeat without one
        assert max(e.end for e in line) - 6 * count <= most * pp + 4


@pytest.mark.parametrize("seed", range(3))
def test_blocking_messages_occupy_the_later_stage_both_ways(seed: int) -> None:
    passes = random_passes(seed, 4)
    blocking = passes.blocking()
    total, waits = blocking.forward + blocking.backward, passes.message
    expected = passes.forward + passes.backward
    torch.testing.assert_close(total[:, 1:], expected[:, 1:] + 2 * waits)
    torch.testing.assert_close(total[:, 0], expected[:, 0])
    # a message beside which the devices compute never costs more
    assert (device_ends(passes, "1f1b", 4, 1) <= device_ends(blocking, "1f1b", 4, 1) + 1e-12).all()


def test_a_group_of_interleaved_micro_batches_must_be_whole() -> None:
    with pytest.raises(UnsupportedError, match=r"num_micro_batches=10 .* try 8"):
        find("interleaved").orders(4, 10, 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_closed_form_says_is_in_flight_is_what_the_order_of_the_passes_holds(
    name: str,
) -> None:
    schedule = find(name)
    for chunks in (2, 3) if schedule.chunks is None else (schedule.chunks,):
        for pp, count in ((1, 2), (2, 4), (3, 12), (4, 8), (4, 12), (5, 40), (6, 24)):
            held = schedule.in_flight(pp, count, chunks)
            places = schedule.devices(pp, pp * chunks)
            for device, order in enumerate(schedule.orders(pp, count, chunks)):
                now = most = 0
                for kind, _, _ in order:
                    now += (kind == "F") - (kind == ("W" if schedule.split else "B"))
                    most = max(most, now)
                assert most == sum(
                    n for n, place in zip(held, places, strict=True) if place == device
                )
            if name != "gpipe" and schedule.chunks is not None:
                assert held == Schedule.in_flight(schedule, pp, count, chunks)
