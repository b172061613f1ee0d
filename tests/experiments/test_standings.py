"""The sentences of a comparison: where the default is beaten, and by whom."""

import pytest

from experiments.comparison.runs import AUTO, ORACLE, SEARCH, Run
from experiments.comparison.standings import default_verdict


def run(method: str, cost: float, seconds: float, seed: int | None = None) -> Run:
    """A row of one problem."""
    return Run("p", method, seed, cost, seconds, 1, False, 0.0)


def test_a_default_that_is_best_and_fast_is_said_to_be_so() -> None:
    lines = default_verdict([run(AUTO, 1.0, 2.0), run("amp", 1.0, 3.0), run("alpa", 2.0, 0.1)])
    assert "best plan on 1 of 1 problems." in lines[0]
    assert "on 0 problems." in lines[1]


def test_a_default_that_is_beaten_or_slower_is_named_with_the_figures() -> None:
    rows = [run(AUTO, 1.1, 2.0), run("amp", 1.0, 1.0), run(ORACLE, 0.9, 60.0)]
    beaten, slower = default_verdict(rows)
    assert "0 of 1 problems; worse on p by 10.000 % (amp)." in beaten
    assert "on 1 problems: p (2.0 s against 1.0 s)" in slower


def test_seeds_count_by_their_medians_and_no_match_means_nothing_to_be_slower_than() -> None:
    rows = [
        run(AUTO, 1.0, 50.0),
        *(run(SEARCH, cost, 1.0, seed) for seed, cost in enumerate((0.9, 1.2, 1.3))),
    ]
    beaten, slower = default_verdict(rows)
    assert "1 of 1" in beaten
    assert "on 0 problems" in slower


@pytest.mark.parametrize("rows", [[], [run("amp", 1.0, 1.0)]])
def test_without_the_default_there_is_no_verdict(rows: list[Run]) -> None:
    assert default_verdict(rows) == []
