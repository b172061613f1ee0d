import pytest

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.retraining.asynchronous import (
    EXACT,
    Staleness,
    double_buffered,
    pipedream,
    train_local,
    train_stale,
)
from darts_parallel.bilevel.retraining.retrain import retrain
from tests.support.bilevel_tiny import corpus, tiny_settings

SETTINGS = tiny_settings()


def test_stages_are_as_many_updates_behind_as_there_are_later_ones() -> None:
    four = pipedream(4, 4)
    assert (four.embedding, four.blocks, four.head) == (3, (3, 2, 1, 0), 0)
    assert pipedream(2, 4).blocks == (1, 1, 0, 0)
    assert pipedream(1, 4) == Staleness(0, (0, 0, 0, 0), 0)
    assert double_buffered(2).blocks == (1, 1)
    assert [four.of(name) for name in ("positions", "0.up", "3.down", "norm", "head")] == [3, 3, 0, 0, 0]


def test_without_staleness_or_with_one_replica_training_is_exact_training() -> None:
    exact = retrain((Candidate(1, 1),) * 2, 8, SETTINGS, corpus(), 0, None)
    assert train_stale(SETTINGS, corpus(), pipedream(1, 2), 0, SETTINGS.retrain_steps) == exact
    assert train_local(SETTINGS, corpus(), 1, 1, 0, SETTINGS.retrain_steps) == exact


def test_one_buffered_update_is_exact_training_one_step_late() -> None:
    """With every weight one update behind, the second step sees the initial weights again."""
    exact, late = (
        train_stale(SETTINGS, corpus(), stale, 0, 3) for stale in (pipedream(1, 2), double_buffered(2))
    )
    assert late.training[:1] == exact.training[:1]
    assert late.training[1] != exact.training[1]


def test_prediction_and_discounts_change_stale_training_alone() -> None:
    def final(**changes: float) -> float:
        return train_stale(SETTINGS, corpus(), pipedream(2, 2, **changes), 0, 6).training[-1][1]  # type: ignore[arg-type]

    assert len({final(), final(predicted=True), final(discounted=0.5)}) == 3
    plain = train_stale(SETTINGS, corpus(), pipedream(1, 2, predicted=True, discounted=0.5), 0, 6)
    assert plain == train_stale(SETTINGS, corpus(), pipedream(1, 2), 0, 6)


def test_replicas_that_never_average_differ_from_those_that_do_and_see_all_of_the_batch() -> None:
    often, seldom = (train_local(SETTINGS, corpus(), 4, every, 0, 6) for every in (1, 6))
    assert often.training[0] == seldom.training[0]
    assert often.training[-1] != seldom.training[-1]
    assert often.test[-1][1] == pytest.approx(seldom.test[-1][1], abs=0.5)


@pytest.mark.parametrize("way", ["async_1f1b", "async_1f1b_predicted"])
def test_a_plan_with_an_asynchronous_schedule_is_retrained_with_two_buffers(way: str) -> None:
    settings = tiny_settings()
    own = retrain((EXACT,) * settings.num_blocks, 8, settings, corpus(), 3, None, way=way)
    stale = double_buffered(settings.num_blocks, predicted=way.endswith("predicted"))
    known = train_stale(settings, corpus(), stale, 3, settings.retrain_steps)
    assert [loss for _, loss in own.test] == pytest.approx([loss for _, loss in known.test], rel=1e-5)
    waits = retrain((EXACT,) * settings.num_blocks, 8, settings, corpus(), 3, None)
    assert own.training[0] == waits.training[0]
    assert own.test[-1] != waits.test[-1]
