"""Every rival by name, and its runs on one problem."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from darts_parallel.cost.table import CostTable
from darts_parallel.errors import UnsupportedError
from darts_parallel.exact.result import Curve, TableResult


@dataclass(frozen=True)
class Rival:
    """A planner of `baselines/` that answers cost tables."""

    name: str
    seeded: bool
    """It draws random numbers and never ends by itself: it gets every seed, and the budget."""
    extra: str = ""
    """Extra of the project that it needs."""

    def solve(self, tables: Sequence[CostTable], kind: str, deadline: float, seed: int) -> TableResult:
        """The best plan until `deadline`, a `time.monotonic()`.

        Errors:
            UnsupportedError: its extra is not installed.
        """
        try:
            module = import_module(f"baselines.{self.name}")
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"methods={self.name} needs {error.name}; nearest legal: pip install "
                f"'darts-parallel[{self.extra}]', or methods without it."
            ) from None
        answer: TableResult = module.solve(tables, kind, deadline=deadline, seed=seed)
        return answer


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("random_search", seeded=True),
        Rival("annealing", seeded=True),
        Rival("flexflow", seeded=True),
        Rival("evolution", seeded=True, extra="rivals"),
        Rival("megatron_rule", seeded=False),
        Rival("fasop", seeded=False),
        Rival("amp", seeded=False),
        Rival("pipedream", seeded=False),
        Rival("dapple", seeded=False),
        Rival("hetpipe", seeded=False),
        Rival("piper", seeded=False),
        Rival("galvatron", seeded=False),
        Rival("alpa", seeded=False, extra="rivals"),
    )
}


@dataclass(frozen=True)
class RivalRun:
    """One answer of a rival."""

    rival: Rival
    seed: int | None
    """None where nothing is random."""
    answer: TableResult
    seconds: float

    @property
    def curve(self) -> Curve:
        """Its anytime curve."""
        return self.answer.curve


def run_rival(
    rival: Rival, tables: Sequence[CostTable], kind: str, seeds: Sequence[int], budget: float, limit: float
) -> list[RivalRun]:
    """All runs of a rival on one problem.

    Args:
        rival: Which.
        tables: The problem.
        kind: Space.
        seeds: For a rival that draws random numbers; others run once.
        budget: Seconds of a rival that never ends by itself.
        limit: Seconds after which one that does is stopped.
    """
    runs = []
    for seed in seeds if rival.seeded else (None,):
        began = time.monotonic()
        answer = rival.solve(tables, kind, began + (budget if rival.seeded else limit), seed or 0)
        runs.append(RivalRun(rival, seed, answer, time.monotonic() - began))
    return runs
