import pytest
import torch

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.estimators.trials import try_pairs
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.local_steps import LocalTrainer, plan_trainer
from darts_parallel.bilevel.retraining.asynchronous import train_local
from darts_parallel.bilevel.retraining.retrain import retrain
from darts_parallel.bilevel.retraining.trainings import Training, Trainings
from darts_parallel.bilevel.transformer import plan_loss
from darts_parallel.errors import ConfigError
from tests.support.bilevel_tiny import corpus, tiny_problem, tiny_settings

SETTINGS = tiny_settings()
FOUR = (Candidate(2, 4),) * SETTINGS.num_blocks


def trained(every: int, steps: int, rounding: str = "nearest") -> LocalTrainer:
    settings = tiny_settings(rounding=rounding)
    trainer = plan_trainer(settings, 8, 0, FOUR, settings.rounds.seeded(0), f"local_{every}")
    assert isinstance(trainer, LocalTrainer)
    for _ in range(steps):
        trainer.advance(corpus().train, lambda weights, tokens: plan_loss(weights, tokens, FOUR), ())
    return trainer


def test_replicas_are_equal_after_an_average_and_differ_in_between() -> None:
    for steps in (2, 3):
        copies = trained(2, steps).stacked["0.up"]
        assert bool((copies == copies[:1]).all()) == (steps == 2)
    drawn, known = (trained(2, 3, rounding).stacked["0.up"] for rounding in ("stochastic", "nearest"))
    torch.testing.assert_close(drawn, known, rtol=1e-4, atol=1e-5)  # one replica after the other, or batched


def test_a_plan_of_local_steps_is_retrained_as_its_replicas_say() -> None:
    own = retrain(FOUR, 8, SETTINGS, corpus(), 3, None, way="local_2")
    assert own == train_local(SETTINGS, corpus(), 4, 2, 3, SETTINGS.retrain_steps)
    waits = retrain(FOUR, 8, SETTINGS, corpus(), 3, None)
    assert own.training[0][1] == pytest.approx(waits.training[0][1], rel=1e-5)
    assert own.test[-1] != waits.test[-1]


def test_trials_price_local_steps_and_a_choice_of_them_needs_trials() -> None:
    settings = tiny_settings(trial_steps=5)
    known = try_pairs(
        settings, corpus().train, ((1, 16),), ((1, 16), (4, 16)), Jobs(), ways=("1f1b", "local_4")
    )
    assert set(known.way_log_steps) == {"local_4"}
    assert known.steps == 10
    with pytest.raises(ConfigError, match=r"must hold 1, which trials compare with; nearest legal: \[1, 4"):
        tiny_problem(sync_every=(4,))
    with pytest.raises(ConfigError, match=r"sync_every=\[1, 4\] needs bilevel.estimator=trials"):
        tiny_problem(sync_every=(1, 4), estimator="mixture")
    with pytest.raises(ConfigError, match="eight_bits=fp8 rounds to the nearest"):
        tiny_problem(eight_bits="fp8", rounding="stochastic")


def test_trainings_of_other_replicas_are_kept_apart(tmp_path: object) -> None:
    with Jobs() as jobs:
        keep = Trainings(tmp_path, corpus(), jobs)  # type: ignore[arg-type]
        wanted = [Training((Candidate(1, dp),) * 2, 8, 0, None, way="local_4") for dp in (2, 4, 4)]
        two, four, again = keep.run(wanted, tiny_settings(retrain_steps=4))
    assert two != four == again
