import random

import numpy as np
import pytest

from darts_parallel.cost import schedule_graph
from darts_parallel.cost.schedule_graph import compiled
from darts_parallel.schedules._block import BuildingBlock, held, move_together, repeated
from darts_parallel.schedules.v_half import SCHEDULE as V_HALF
from darts_parallel.schedules.v_min import SCHEDULE as V_MIN

PLACES = [("1f1b", 1), ("zero_bubble_h1", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble_v", 2),
          ("v_half", 2), ("v_min", 2), ("dualpipe", 2), ("gpipe", 1)]  # fmt: skip


@pytest.mark.parametrize(("schedule", "chunks"), PLACES)
def test_a_schedule_that_grew_by_frames_is_the_one_written_pass_by_pass(
    schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{schedule} {chunks}")
    sizes = [(pp, pp * rng.randint(5, 12) + rng.randrange(pp)) for pp in (1, 2, 3, 5, 8)]
    sizes = [(pp, count - count % pp if schedule == "interleaved" else count) for pp, count in sizes]
    grown = [compiled.__wrapped__(schedule, pp, count, chunks) for pp, count in sizes]
    slow: list[int] = []
    counted = schedule_graph._counted_hops
    monkeypatch.setattr(schedule_graph, "_repeated_frames", lambda *numbers: None)
    monkeypatch.setattr(schedule_graph, "_counted_hops", lambda *a: (slow.append(1), counted(*a))[1])
    for (pp, count), graph in zip(sizes, grown, strict=True):
        written = compiled.__wrapped__(schedule, pp, count, chunks)
        assert graph.bounds == written.bounds
        for name in ("operations", "previous", "source", "duration", "message", "last", "frames"):
            assert np.array_equal(getattr(graph, name), getattr(written, name)), (name, pp, count)
    assert len(slow) == len(sizes)


@pytest.mark.parametrize(("schedule", "chunks"), PLACES[:-1])
def test_many_micro_batches_are_not_gone_through_pass_by_pass(
    schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled.__wrapped__(schedule, 4, 40, chunks)  # what grows is remembered
    monkeypatch.setattr(schedule_graph, "_counted_hops", None)
    assert compiled.__wrapped__(schedule, 4, 400, chunks).num_micro_batches == 400


@pytest.mark.parametrize("schedule", [V_HALF, V_MIN])
@pytest.mark.parametrize("pp", [3, 4, 7])
def test_passes_that_move_together_run_no_later_and_are_held_no_more(
    schedule: BuildingBlock, pp: int
) -> None:
    slots = repeated(schedule, pp, 2 * pp)
    before = [{entry: time for time, entry in row.items()} for row in slots]
    counts = [held(row) for row in slots]
    most = max(int(row.max()) for row in counts)
    move_together(slots, counts, [-1] * pp)
    for row, times in zip(slots, before, strict=True):
        assert len(row) == len(times)
        assert all(time <= times[entry] for time, entry in row.items())
        assert held(row).max() <= most
