from itertools import pairwise

import pytest
import torch
from torch import Tensor

from darts_parallel.cost.pipeline import PipelineModel
from darts_parallel.cost.simulation import (
    Criticalities,
    PassSeconds,
    PathMemory,
    simulated_seconds,
    timeline,
)

CASES = [("1f1b", 1), ("gpipe", 1), ("zero_bubble_h1", 1), ("interleaved", 3), ("v_half", 2)]
PLANS = 4


def pipelines(seed: int, stages: int, pp: int) -> tuple[PassSeconds, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def rand(count: int) -> Tensor:
        return 0.1 + torch.rand(PLANS, count, generator=rng, dtype=torch.float64)

    backward = 2.0 * rand(stages)
    return PassSeconds(rand(stages), backward, backward / 2, 0.2 * rand(stages - 1)), 3.0 * rand(pp)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_a_critical_path_gives_its_own_seconds_and_bounds_those_of_other_plans(
    schedule: str, chunks: int, blocking: bool
) -> None:
    pp, model = 3, PipelineModel(True, schedule, blocking)
    count = torch.tensor([6, 12, 30, 60])
    passes, sync = pipelines(0, pp * chunks, pp)
    path = Criticalities.of(passes, sync, count, model)
    total, _ = simulated_seconds(passes, sync, count, model)
    torch.testing.assert_close(path.seconds(passes, sync), total, rtol=1e-12, atol=0.0)
    for seed in range(1, 6):
        others, syncs = pipelines(seed, pp * chunks, pp)
        exact = simulated_seconds(others, syncs, count, model)[0]
        assert (path.seconds(others, syncs) <= exact * (1 + 1e-12)).all()


def test_remembered_paths_are_exact_where_they_are_taken_and_below_in_between() -> None:
    pp, model = 4, PipelineModel(True, "1f1b", True)
    count = torch.full((PLANS,), 8)
    memory = PathMemory(every=3)
    for step in range(7):
        passes, sync = pipelines(step, pp, pp)
        seconds, awaited = memory.seconds(passes, sync, count, model)
        exact = simulated_seconds(passes, sync, count, model)[0]
        assert (seconds <= exact * (1 + 1e-12)).all()
        assert (awaited <= sync.amax(1)).all()
        if step % 3 == 0:
            torch.testing.assert_close(seconds, exact, rtol=1e-12, atol=0.0)
    assert len(memory.paths) == 3
    few = PathMemory(every=1, keep=2)
    for step in range(4):
        passes, sync = pipelines(step, pp, pp)
        seconds, awaited = few.seconds(passes, sync, count, model)
        known = torch.stack([path.seconds(passes, sync) for path in few.paths])
        torch.testing.assert_close(seconds, known.amax(0), rtol=0.0, atol=0.0)
        # the iteration waits for the synchronisation of one device
        assert ((sync - awaited.unsqueeze(1)).abs().amin(1) < 1e-12).all()
    assert len(few.paths) == 2


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
def test_the_drawn_path_is_a_chain_of_passes_as_long_as_the_schedule(
    schedule: str, chunks: int
) -> None:
    pp, count = 3, 6
    passes, sync = pipelines(2, pp * chunks, pp)
    one = PassSeconds(
        passes.forward[:1],
        passes.backward[:1],
        passes.weight_gradient[:1],
        0.0 * passes.message[:1],
    )
    events = sorted(
        (e for e in timeline(one, schedule, sync[0], count) if e.critical), key=lambda e: e.start
    )
    assert events[0].start == 0.0
    # without messages every pass begins when the one before it on the path ends
    for before, after in pairwise(events):
        assert after.start == pytest.approx(before.end, rel=1e-12)
    total, _ = simulated_seconds(
        one, sync[:1], torch.tensor([count]), PipelineModel(True, schedule, False)
    )
    assert events[-1].end + float(sync[0, events[-1].device]) == pytest.approx(
        float(total[0]), rel=1e-12
    )
