"""The best plan that a planner has met, and when: what makes anytime curves."""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from darts_parallel.cost import BatchCost, CostTable, HardPlans, PricedPlan, evaluate_batch, without_dominated
from darts_parallel.exact import TableResult

ENDLESS = 10**9
"""Steps that nobody waits for."""


class Incumbent:
    """Price plans, remember the best feasible one and the seconds of every improvement.

    Works on the tables without dominated strategies, as the gradient search does; answers refer to the
    tables as they were given.

    Args:
        tables: One for each pipeline degree.
        deadline: `time.monotonic()` at which to stop; None: never.
        keep_all: Keep dominated strategies too, for planners that want a certain one.
        max_steps: After which a planner that never ends by itself stops in any case.
    """

    def __init__(
        self,
        tables: Sequence[CostTable],
        deadline: float | None,
        *,
        keep_all: bool = False,
        max_steps: int = ENDLESS,
    ) -> None:
        self.began = time.monotonic()
        self.deadline = float("inf") if deadline is None else deadline
        self.given = tables
        self.max_steps = max_steps
        self.tables = list(tables) if keep_all else [without_dominated(table) for table in tables]
        self.best: PricedPlan | None = None
        self.curve: list[tuple[float, float]] = []
        self.evaluated = 0

    @property
    def cost(self) -> float:
        """Return seconds per iteration of the best plan; infinite without one."""
        return float("inf") if self.best is None else self.best.time

    def over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.deadline

    def steps(self) -> Iterator[int]:
        """Yield step numbers of a planner that never ends by itself, until the time is over."""
        for step in range(self.max_steps):
            if self.over():
                return
            yield step

    def offer(self, table: int, plans: HardPlans) -> BatchCost:
        """Price plans of one table and keep the best feasible one."""
        cost = evaluate_batch(self.tables[table], plans)
        self.evaluated += len(plans)
        times = cost.iteration_time.masked_fill(~cost.feasible, torch.inf)
        row = int(times.argmin())
        if float(times[row]) < self.cost:
            self.best = PricedPlan(table, plans[row : row + 1], float(times[row]))
            self.curve.append((time.monotonic() - self.began, self.best.time))
        return cost

    def result(self) -> TableResult:
        """Return the best plan; nothing is proven."""
        best = None
        if self.best is not None:
            index, plans = self.best.table, self.best.plan
            choices = self._as_given(index)[plans.choices]
            best = PricedPlan(index, HardPlans(plans.outer, choices, plans.first_layers), self.best.time)
        return TableResult(best, 0.0, False, self.evaluated, curve=tuple(self.curve))

    def _as_given(self, index: int) -> Tensor:
        """Return the number in the given table of every strategy that was kept, `(C,)`."""
        numbers = {choice: c for c, choice in enumerate(self.given[index].choices)}
        return torch.tensor([numbers[choice] for choice in self.tables[index].choices])
