"""Runs of a rival on one problem."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baselines import Planner
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import Curve, TableResult


@dataclass(frozen=True)
class RivalRun:
    """One answer of a rival."""

    rival: Planner
    seed: int | None
    """None where nothing is random."""
    answer: TableResult
    seconds: float

    @property
    def curve(self) -> Curve:
        """Its anytime curve."""
        return self.answer.curve


def run_rival(
    rival: Planner,
    tables: Sequence[CostTable],
    space_kind: str,
    seeds: Sequence[int],
    budget: float,
    limit: float,
) -> list[RivalRun]:
    """All runs of a rival on one problem.

    Args:
        rival: Which.
        tables: The problem.
        space_kind: Space.
        seeds: For a rival that draws random numbers; others run once.
        budget: Seconds of a rival that never ends by itself.
        limit: Seconds after which one that does is stopped.
    """
    runs = []
    for seed in seeds if rival.seeded else (None,):
        began = time.monotonic()
        answer = rival.solve(
            tables, space_kind, deadline=began + (budget if rival.seeded else limit), seed=seed or 0
        )
        runs.append(RivalRun(rival, seed, answer, time.monotonic() - began))
    return runs
