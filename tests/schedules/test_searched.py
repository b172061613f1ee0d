"""Codes of orders of passes: every rule has one, and what is no order is refused by a sentence that helps."""

import re

import numpy as np
import pytest

from darts_parallel.errors import PlanError
from darts_parallel.schedules import NAMES, Schedule, find, order_code
from tests.schedules.test_contract import SCHEDULES


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_rule_and_the_code_of_its_passes_are_one_order(schedule: Schedule, chunks: int) -> None:
    pp, count = 3, 6
    read = find(schedule.code(pp, count, chunks))
    assert read.devices(pp, pp * chunks) == schedule.devices(pp, pp * chunks)
    names = {"B": "I"} if schedule.split else {}
    written = schedule.orders(pp, count, chunks)
    assert [
        [entry._replace(kind=names.get(entry.kind, entry.kind)) for entry in row] for row in written
    ] == [list(row) for row in read.orders(pp, count, chunks)]
    assert read.refusal(pp, pp * chunks, count) is None  # type: ignore[attr-defined]
    if schedule.name != "interleaved":  # its rule counts where the warm-up puts them
        places = list(read.devices(pp, pp * chunks))
        held = [rule.in_flight(pp, count, chunks) for rule in (read, schedule)]
        of_device = [np.bincount(places, weights=flying).tolist() for flying in held]
        assert of_device[0] == of_device[1]


GOOD = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1W0", "1B1"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[:1], "order lists 1 devices, which must be all pp=2; try 2"),
        (lambda rows: [rows[0][:-1], rows[1]], "must have every pass once, and lacks 0I1; try 0I1"),
        (lambda rows: [[*rows[0], "0B1"], rows[1]], "has 0B1, which must be a pass of its stages"),
        (lambda rows: [["1F0", *rows[0]], rows[1]], "has 1F0, which must be a pass of its stages"),
        (
            lambda rows: [["0B0", *rows[0][:2], "0B1"], rows[1]],
            "order[0]: 0B0 deadlocks here; put 1I0 first",
        ),
        (lambda rows: [["0F0x", *rows[0]], rows[1]], "'0F0x', which must be stage, F, I, W or B"),
    ],
)
def test_what_is_no_order_is_refused_with_the_closest_pass(change, words: str) -> None:  # type: ignore[no-untyped-def]
    assert find(order_code("loop", GOOD)).refusal(2, 2, 2) is None  # type: ignore[attr-defined]
    try:
        sentence = find(order_code("loop", change(GOOD))).refusal(2, 2, 2)  # type: ignore[attr-defined]
    except PlanError as error:
        sentence = str(error)
    assert re.search(re.escape(words), sentence)


def test_an_unknown_placement_is_refused() -> None:
    """It was read as `loop`."""
    code = order_code("loop", GOOD).replace("loop", "bla")
    with pytest.raises(PlanError, match=r"placement='bla' must be loop or v; try loop\.$"):
        find(code)


def test_no_rule_is_called_like_an_order() -> None:
    assert not any(name.startswith("searched") for name in NAMES)
