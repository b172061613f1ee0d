"""The interface of every rival of the literature: its best plan so far, and its answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from darts_parallel.cost import (
    BatchCost,
    HardPlans,
    PricedPlan,
    Tables,
    evaluate_batch,
    without_dominated,
)
from darts_parallel.exact import TableResult


class Incumbent:
    """Price plans, and remember the best feasible one.

    Works on the tables without dominated strategies, as the gradient search does; answers refer to the
    tables as they were given.

    Args:
        keep_all: Keep dominated strategies too, for planners that want a certain one.
    """

    def __init__(
        self,
        tables: Tables,
        *,
        keep_all: bool = False,
    ) -> None:
        self.given = tables
        self.seed = 0
        """Seed of the random numbers."""
        self.deadline = inf
        """`time.monotonic()` at which to stop."""
        self.tables = list(tables)
        if not keep_all:
            self.tables = [without_dominated(table) for table in tables]
        self.best: PricedPlan | None = None
        self.evaluated = 0

    @property
    def cost(self) -> float:
        """Return seconds per iteration of the best plan; infinite without one."""
        return inf if self.best is None else self.best.time

    def over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.deadline

    def offer(
        self,
        table: int,
        plans: HardPlans,
    ) -> BatchCost:
        """Price plans of one table and keep the best feasible one."""
        cost = evaluate_batch(self.tables[table], plans)
        self.evaluated += len(plans)
        times = cost.fitting_seconds
        row = int(times.argmin())
        if float(times[row]) < self.cost:
            plan = plans[row : row + 1]
            self.best = PricedPlan(table, plan, float(times[row]))
        return cost

    def result(self) -> TableResult:
        """Return the best plan; nothing is proven."""
        best = None
        if self.best is not None:
            index = self.best.table
            plans = self.best.plan
            choices = self._as_given(index)[plans.choices]
            given = HardPlans(plans.outer, choices, plans.first_layers)
            best = PricedPlan(index, given, self.best.time)
        return TableResult(best, 0.0, False, self.evaluated)

    def _as_given(self, index: int) -> Tensor:
        """Return the number in the given table of every strategy that was kept, `(C,)`."""
        given = list(self.given[index].choices)
        numbers = [given.index(choice) for choice in self.tables[index].choices]
        return torch.tensor(numbers)


DEFAULT_SECONDS = 10.0
"""Budget of a planner that never ends by itself, where none is given."""


OfferPlans = Callable[[Incumbent], None]
"""Takes the incumbent, which holds the tables, the deadline and the seed."""


@dataclass(frozen=True)
class Planner:
    """Solve cost tables by the plans that a rival offers: one module of `baselines/`, one paper.

    Rivals search the layer-wise space, which the comparisons ask for.
    """

    name: str
    """Name of its module."""
    offer_plans: OfferPlans
    keep_all: bool = False
    """Keep dominated strategies too, for planners that want a certain one."""
    seeded: bool = False
    """It draws random numbers and never ends by itself: it gets every seed, and the budget."""

    def solve(
        self,
        tables: Tables,
        *,
        deadline: float | None = None,
        seed: int = 0,
    ) -> TableResult:
        """Return the best plan until `deadline`.

        Args:
            deadline: `time.monotonic()` at which to stop; None: as long as it takes, or `DEFAULT_SECONDS` for
                a planner that never ends by itself.
        """
        incumbent = Incumbent(tables, keep_all=self.keep_all)
        incumbent.seed = seed
        if deadline is not None:
            incumbent.deadline = deadline
        elif self.seeded:
            incumbent.deadline = time.monotonic() + DEFAULT_SECONDS
        self.offer_plans(incumbent)
        return incumbent.result()

    __call__ = solve


def on_tables(offer_plans: OfferPlans, **abilities: bool) -> Planner:
    """Return the planner of the module that defines `offer_plans`; abilities are fields of `Planner`."""
    return Planner(offer_plans.__module__.rpartition(".")[2], offer_plans, **abilities)
