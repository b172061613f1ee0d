from dataclasses import replace

import pytest

from experiments import answers


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answers.PROBLEMS, "toy", "model=toy cluster=toy space=uniform search=exact")


def test_a_row_is_what_the_command_answers(toy: None) -> None:
    (row,) = answers.answer(("toy", "none", 100.0))
    assert row.plan.startswith("dp "), row.reason
    assert row.fits >= 1 - answers.WHOLE
    assert 0 < row.half_width < 1
    assert row.iteration_time_s < row.command_s
    text = answers.report([row, replace(row, trainer="torch", fits=0.5)]).text
    assert "2 of 2 pairs have a plan" in text
    assert "1 of them: toy for torch." in text


def test_a_trainer_that_takes_nothing_is_named_with_the_reason(toy: None) -> None:
    (slow,) = answers.answer(("toy", "none", 0.01))
    assert slow.reason == "no answer within 0.01 s"
    (refused,) = answers.answer(("toy", "nosuch", 100.0))
    assert "trainer=nosuch" in refused.reason
    assert refused.plan == ""
    assert f"- toy, nosuch: {refused.reason}" in answers.report([slow, refused]).text
