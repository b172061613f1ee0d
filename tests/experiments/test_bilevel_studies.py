from pathlib import Path

import pytest

from experiments import bilevel, bilevel_crossover
from tests.support.bilevel_tiny import BILEVEL, SIZES, corpus

TINY = [*SIZES, *(f"bilevel.{key}={value}" for key, value in BILEVEL.items())]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study reads the tests' corpus instead of the whole library."""
    monkeypatch.setattr(bilevel_crossover, "load_corpus", corpus)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside TensorBoard
def test_the_crossover_has_a_row_for_every_bandwidth_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilevel_crossover, "BITS", (16, 4))
    options = bilevel_crossover.CrossoverOptions(
        bandwidths_GBps=[0.1, 32.0], seeds=[0], jobs=1, out=str(tmp_path), problem=TINY
    )
    assert bilevel_crossover.run(options) == 0
    text = (tmp_path / "bilevel_crossover.md").read_text(encoding="utf-8")
    assert "| 0.1 |" in text
    assert "| 32 |" in text
    assert (tmp_path / "crossover.png").stat().st_size > 1000


def test_the_command_of_the_trainings_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    bilevel.main(["--help"])
    assert "python -m experiments.bilevel" in capsys.readouterr().out
