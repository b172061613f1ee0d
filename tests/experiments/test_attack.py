"""The attack of `experiments.attack`, small enough to run every time."""

import random
import signal
from functools import partial
from math import isfinite
from pathlib import Path

import pytest

from darts_parallel.config.options import parse
from darts_parallel.errors import ConfigError
from experiments import attack
from experiments.robustness import problems
from experiments.robustness.experiment_options import commands, options_of
from experiments.robustness.inputs import answered, keys
from experiments.robustness.oracle import cheapest
from experiments.robustness.problems import problem_of, random_settings, tried
from experiments.robustness.verdict import Log, Try, Verdict

FEW = 20
"""Plans of a problem here."""


def small(seed: int) -> problems.Settings:
    """A problem with at most a few plans."""
    rng = random.Random(seed)
    while True:
        settings = random_settings(rng)
        if tried(settings, FEW, whole=False).outcome == "agreed":
            return settings


def test_sixty_random_problems_are_answered_as_the_oracle_does() -> None:
    verdicts = [wanted.verdict() for wanted in problems.tries(60, seed=18, limit=FEW)]
    assert [verdict for verdict in verdicts if verdict.wrong] == []
    outcomes = [verdict.outcome for verdict in verdicts]
    assert outcomes.count("agreed") > 40


def test_a_false_claim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))
    drawn = (small(seed) for seed in seeds)
    settings, best = next(
        (found, best) for found in drawn if isfinite(best := cheapest(problem_of(found), FEW)[0])
    )
    for other in (0.5 * best, 2.0 * best, float("inf")):
        answer = (other, 1)
        monkeypatch.setattr(problems, "cheapest", lambda problem, limit, answer=answer: answer)
        assert tried(settings, FEW, whole=False).wrong
        assert tried(settings, FEW).wrong


@pytest.mark.parametrize("value", ["-1", ".nan", "1e300", "'a\\nb'"])
def test_no_key_takes_a_bad_value_without_a_sentence(value: str) -> None:
    rng = random.Random(value)
    for key in rng.sample(keys(), 4):
        answer = answered(f"{key}={value}", search=False)
        assert not answer.wrong, answer


def test_every_experiment_has_options_that_are_attacked() -> None:
    without = [module for module in commands() if not options_of(module)]
    assert without == ["experiments.bilevel"]  # its options are those of the command


def test_a_stopped_attack_shows_what_it_tried_and_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def find(number: int) -> Verdict:
        asked.append(number)
        if asked == [0, 1, 2]:
            signal.raise_signal(signal.SIGTERM)
        return Verdict(f"try {number}", "false" if number == 1 and asked.count(1) == 1 else "agreed")

    tries = [Try("numbers", str(number), partial(find, number)) for number in range(4)]
    monkeypatch.setattr(attack, "tries", lambda options: tries)
    options = attack.AttackOptions(log=str(tmp_path / "log.jsonl"))
    assert attack.run(options) == 1
    assert "| numbers | 2 | 1 |" in (said := capsys.readouterr().out)
    assert "Stopped before its end" in said
    assert "try 1: false" in said
    assert attack.run(options) == 0
    assert asked == [0, 1, 2, 1, 2, 3]  # a wrong answer is asked for again
    assert "| numbers | 4 | 0 | 1 | 4 agreed |" in capsys.readouterr().out
    assert len(Log(options.log).once_wrong) == 1


@pytest.mark.parametrize("value", ["2", "0", "1e300"])
def test_a_number_is_no_switch(value: str) -> None:
    with pytest.raises(ConfigError, match="must be true or false"):
        parse(attack.AttackOptions, [f"publish={value}"])
