"""The interface of every rival of the literature, and its answer to a problem."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baselines._incumbent import ENDLESS, Incumbent
from darts_parallel.cost import CostTable
from darts_parallel.exact import TableResult

DEFAULT_SECONDS = 10.0
"""Budget of a planner that never ends by itself, where none is given."""


OfferPlans = Callable[[Incumbent, str, int], None]
"""Takes the incumbent that holds the tables and the deadline, the kind of space and a seed."""


@dataclass(frozen=True)
class Planner:
    """Solve cost tables by the plans that a rival offers: one module of `baselines/`, one paper."""

    name: str
    """Name of its module."""
    offer_plans: OfferPlans
    keep_all: bool = False
    """Keep dominated strategies too, for planners that want a certain one."""
    seeded: bool = False
    """It draws random numbers and never ends by itself: it gets every seed, and the budget."""
    layerwise: bool = False
    """Its plans may differ from layer to layer; the others' are uniform."""
    closed_form: bool = True
    """It takes part where the pipeline has a closed form."""
    chunks: bool = False
    """It takes part where the schedule is a choice and a device holds chunks: it reads no closed form."""

    def solve(
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
        end = time.monotonic() + DEFAULT_SECONDS if deadline is None and self.seeded else deadline
        incumbent = Incumbent(tables, end, keep_all=self.keep_all, max_steps=max_steps)
        self.offer_plans(incumbent, space_kind, seed)
        return incumbent.result()

    __call__ = solve


def on_tables(offer_plans: OfferPlans, **abilities: bool) -> Planner:
    """Return the planner of the module that defines `offer_plans`; abilities are fields of `Planner`."""
    return Planner(offer_plans.__module__.rpartition(".")[2], offer_plans, **abilities)
