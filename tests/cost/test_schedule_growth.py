import random

import numpy as np
import pytest

from darts_parallel.cost import schedule_graph
from darts_parallel.cost.schedule_graph import compiled

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
