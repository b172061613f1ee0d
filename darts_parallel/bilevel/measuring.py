"""Measuring on a machine that others disturb: all cases in turn, medians over the rounds."""

from collections.abc import Callable, Sequence
from statistics import median

Case = Callable[[], Sequence[float]]
"""Runs once and returns its seconds, always as many."""


def interleaved_medians(
    cases: Sequence[Case], go_on: Callable[[int], bool], *, warm_up: bool = True
) -> list[tuple[float, ...]]:
    """Medians of the seconds of every case.

    All cases run once in every round, so that a disturbance meets them all alike, and the median leaves it
    out where it was short.

    Args:
        cases: What to run.
        go_on: Whether another round follows, given the rounds that are done; asked once before each.
        warm_up: Run every case once without counting it.

    Returns:
        As many seconds for each case as it returns.
    """
    if warm_up:
        for case in cases:
            case()
    rounds: list[list[Sequence[float]]] = []
    while go_on(len(rounds)):
        rounds.append([case() for case in cases])
    return [
        tuple(median(column) for column in zip(*(one[index] for one in rounds), strict=True))
        for index in range(len(cases))
    ]
