"""Run a small part of the fuzz test, and show that it notices false claims."""

import random
from math import isfinite

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import problems
from tests.fuzz.case import GOOD
from tests.fuzz.oracle import cheapest

FEW = 20  # plans of a problem here


@pytest.mark.slow
def test_some_problems_and_bad_values_are_answered_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "--problems",
        "5",
        "--limit",
        str(FEW),
        "--inputs",
        "6",
        "--files",
        "2",
        "--splits",
        "8",
        "--kills",
        "0",
    ]
    assert fuzz.main([*sizes, "--seed", "18"]) == 0
    said = capsys.readouterr().out
    assert "Nothing was wrong." in said
    assert "| bad values of keys | 6 | 0 |" in said
    assert "| spoilt words and files | 2 | 0 |" in said
    assert "| splits of operators | 8 | 0 |" in said
    assert "| random problems | 5 | 0 |" in said


@pytest.mark.slow
def test_a_false_claim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = (problems.random_settings(random.Random(seed)) for seed in range(1000))
    settings = next(found for found in drawn if problems.judge(found, FEW).outcome == "agreed")
    best = cheapest(problems.problem_of(settings), FEW)[0]
    others = (0.5 * best, 2.0 * best, float("inf")) if isfinite(best) else (1.0,)
    for other in others:
        answer = (other, 1)
        monkeypatch.setattr(problems, "cheapest", lambda problem, limit, answer=answer: answer)
        assert problems.judge(settings, FEW).outcome not in GOOD
