from pathlib import Path

import pytest

from experiments import bilevel, bilevel_crossover, bilevel_estimators, bilevel_staleness
from tests.support.bilevel_tiny import BILEVEL, SIZES, corpus

TINY = [*SIZES, *(f"bilevel.{key}={value}" for key, value in BILEVEL.items())]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The studies read the tests' corpus instead of the whole library."""
    for module in (bilevel_crossover, bilevel_estimators, bilevel_staleness):
        monkeypatch.setattr(module, "load_corpus", corpus)


def test_estimators_are_held_against_trainings_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilevel_estimators, "MEASURED", 1)
    monkeypatch.setattr(bilevel_estimators, "LATER_STEPS", 2)
    options = bilevel_estimators.EstimatorOptions(
        seeds=[0], steps=4, trial_steps=4, search_steps=2, problem=TINY, processes=1, out=str(tmp_path)
    )
    assert bilevel_estimators.run(options) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| truth |" in text
    for name in ("trials of 4 steps", "switches", "mixture slope, second order", "Gumbel slope"):
        assert f"| {name} |" in text
    rows = (tmp_path / "bilevel_estimators.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0] == "seed,estimator,judged,cost"
    # a seed: truth, trials of all and gradients read in three ways, both with log steps; switches and three
    # slopes by block; trials from a mixture
    assert len(rows) == 1 + 6 + 2 * 4 + 4 * 3 + 1


def test_ways_that_do_not_wait_are_priced_in_steps_and_in_seconds(tmp_path: Path) -> None:
    options = bilevel_staleness.StalenessOptions(
        seeds=[0], steps=8, problem=TINY, processes=1, out=str(tmp_path)
    )
    assert bilevel_staleness.run(options) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert all(f"| {way} |" in text for way in bilevel_staleness.WAYS)
    synchronous = next(line for line in text.splitlines() if line.startswith("| synchronous |"))
    assert synchronous.startswith("| synchronous | +0.0000 (+0.0000 to +0.0000) | ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_crossover_has_a_row_for_every_bandwidth_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilevel_crossover, "BITS", (16, 4))
    options = bilevel_crossover.CrossoverOptions(
        bandwidths_GBps=[0.1, 32.0], seeds=[0], processes=1, out=str(tmp_path), problem=TINY
    )
    assert bilevel_crossover.run(options) == 0
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| 0.1 |" in text
    assert "| 32 |" in text
    assert (tmp_path / "crossover.png").stat().st_size > 1000
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_command_of_the_trainings_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    bilevel.main(["--help"])
    assert "python -m experiments.bilevel" in capsys.readouterr().out
