"""The interface of every rival of the literature, and its answer to a problem."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from baselines.incumbent import ENDLESS, Incumbent
from darts_parallel.cost import CostTable
from darts_parallel.exact import TableResult

DEFAULT_SECONDS = 10.0
"""Budget of a planner that never ends by itself, where none is given."""


class Solve(Protocol):
    """Plan cost tables."""

    def __call__(
        self,
        tables: Sequence[CostTable],
        space_kind: str,
        *,
        deadline: float | None = None,
        seed: int = 0,
        max_steps: int = ENDLESS,
    ) -> TableResult:
        """Return the best plan until `deadline`.

        Args:
            tables: One for each pipeline degree.
            space_kind: `uniform`, `stagewise` or `layerwise`.
            deadline: `time.monotonic()` at which to stop; None: as long as it takes, or `DEFAULT_SECONDS` for
                a planner that never ends by itself.
            seed: Of all random numbers; ignored where nothing is random.
            max_steps: After which a planner that never ends by itself stops in any case.
        """


def on_tables(
    offer_plans: Callable[[Incumbent, str, int], None], *, keep_all: bool = False, endless: bool = False
) -> Solve:
    """Return the planner of cost tables whose plans a function offers.

    Args:
        offer_plans: Takes the incumbent that holds the tables and the deadline, the kind of space and a seed.
        keep_all: Keep dominated strategies too, for planners that want a certain one.
        endless: It never ends by itself.
    """

    def solve(
        tables: Sequence[CostTable],
        space_kind: str,
        *,
        deadline: float | None = None,
        seed: int = 0,
        max_steps: int = ENDLESS,
    ) -> TableResult:
        end = time.monotonic() + DEFAULT_SECONDS if deadline is None and endless else deadline
        incumbent = Incumbent(tables, end, keep_all=keep_all, max_steps=max_steps)
        offer_plans(incumbent, space_kind, seed)
        return incumbent.result()

    return solve


@dataclass(frozen=True)
class Planner:
    """Describe a rival: one module of `baselines/`, one paper."""

    name: str
    """Name of its module."""
    seeded: bool = False
    """It draws random numbers and never ends by itself: it gets every seed, and the budget."""
    layerwise: bool = False
    """Its plans may differ from layer to layer; the others' are uniform."""

    def solve(
        self, tables: Sequence[CostTable], space_kind: str, *, deadline: float | None = None, seed: int = 0
    ) -> TableResult:
        """Return the best plan until `deadline`; arguments as `Solve`."""
        module = import_module(f"baselines.{self.name}")
        answer: TableResult = module.solve(tables, space_kind, deadline=deadline, seed=seed)
        return answer
