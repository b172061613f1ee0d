from dataclasses import replace

import pytest
import yaml

from darts_parallel.config import EXPORTS
from experiments import answers

ROW = answers.TrainerAnswer("toy", "torch", "dp 2", 1.0, 1.0, 0.9)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answers.PROBLEMS, "toy", "model=toy cluster=toy space=uniform search=exact")


@pytest.mark.slow
def test_a_row_is_what_the_command_answers(toy: None) -> None:
    (row,) = answers.answer(("toy", "none", 100.0))
    assert row.plan.startswith("dp "), row.reason
    assert row.fits >= 1 - answers.WHOLE
    assert row.iteration_time_s == pytest.approx(row.uniform_s)
    assert row.iteration_time_s < row.command_s
    assert not row.warned


def test_risky_and_slow_plans_are_counted_by_what_excuses_them() -> None:
    slow = replace(ROW, iteration_time_s=1.011)
    rows = [ROW, slow, replace(ROW, iteration_time_s=1.009), replace(ROW, fits=0.5, warned=True)]
    text = answers.report(
        [*rows, replace(ROW, reason="trainer=torch: it has precision=fp16, which")]
    )
    assert "4 of 5 pairs have a plan, 1 have a reason. 1 plans run out of memory" in text
    assert "in 1 of them. 1 plans are more than 1 % slower" in text
    assert "`conf/trainer/torch.yaml:" in text


def test_a_trainer_that_takes_nothing_is_named_with_the_reason(toy: None) -> None:
    (slow,) = answers.answer(("toy", "none", 0.01))
    assert slow.reason == "no answer within 0.01 s"
    (refused,) = answers.answer(("toy", "nosuch", 100.0))
    assert "trainer=nosuch" in refused.reason
    assert refused.plan == ""


def test_each_line_of_a_source_has_a_trainer_and_the_lines_of_ours_say_so() -> None:
    for own in yaml.safe_load(answers.REFUSALS.read_text(encoding="utf-8")):
        assert own["trainer"] in EXPORTS
        path, _, number = own["line"].partition(":")
        source = answers.DATA.parents[1] / path
        if own["trainer"] == "torch":
            line = source.read_text(encoding="utf-8").splitlines()[int(number) - 1]
            assert "loss" in line if own["words"] else "chain of blocks" in line
