"""The attack of `experiments.attack`, small enough to run every time."""

import random
from math import isfinite

import pytest

from experiments.robustness import problems
from experiments.robustness.inputs import answered, keys
from experiments.robustness.oracle import cheapest
from experiments.robustness.problems import attack, problem_of, random_settings, tried


def test_random_problems_are_answered_as_the_oracle_does() -> None:
    verdicts = attack(20, seed=18, limit=400)
    assert [verdict for verdict in verdicts if verdict.wrong] == []
    outcomes = {verdict.outcome for verdict in verdicts}
    assert "agreed" in outcomes


def test_a_false_claim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    draws = iter(lambda: random_settings(rng), None)
    sound = (drawn for drawn in draws if tried(drawn, 400).outcome == "agreed")
    settings, best = next(
        (drawn, best) for drawn in sound if isfinite(best := cheapest(problem_of(drawn), 400)[0])
    )
    for other in (0.5 * best, 2.0 * best, float("inf")):
        answer = (other, 1)
        monkeypatch.setattr(problems, "cheapest", lambda problem, limit, answer=answer: answer)
        assert tried(settings, 400).wrong


@pytest.mark.parametrize("value", ["-1", ".nan", "1e300", "'a\\nb'"])
def test_no_key_takes_a_bad_value_without_a_sentence(value: str) -> None:
    rng = random.Random(value)
    for key in rng.sample(keys(), 12):
        answer = answered(f"{key}={value}", search=False)
        assert not answer.wrong, answer
