"""What a baseline reports."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darts_parallel.cost import HardPlans
from darts_parallel.strategy import Plan
from darts_parallel.table import CostTable


class DeadlineError(Exception):
    """The time of an exact planner is over; what it proved so far is kept."""


def deadline_check(deadline: float | None) -> Callable[[], None]:
    """A function that raises `DeadlineError` once `time.monotonic()` is past `deadline`."""

    def check() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineError

    return check


@dataclass(frozen=True)
class BaselineResult:
    """The answer of a baseline to a problem."""

    plan: Plan | None
    """Best plan found; none where no plan was found."""
    iteration_time_s: float
    """True cost of `plan`; infinite without one."""
    seconds: float
    """Wall-clock of the baseline."""
    plans_evaluated: int
    proven: bool
    """Whether `plan` is optimal in the model, or, without a plan, none is feasible."""
    lower_bound_s: float
    """No feasible plan costs less; `iteration_time_s` where proven."""
    note: str = ""
    """One sentence for the reader of a table."""


@dataclass(frozen=True)
class Candidate:
    """One plan of one table, and its true cost in seconds."""

    cost: float
    table_index: int
    plans: HardPlans
    """Of length 1."""

    def to_plan(self, tables: Sequence[CostTable]) -> Plan:
        """The plan in words."""
        return self.plans.to_plan(0, tables[self.table_index])


@dataclass(frozen=True)
class TableResult:
    """The answer of an exact planner to the tables of a problem."""

    best: Candidate | None
    lower_bound: float
    """Seconds; no feasible plan costs less."""
    proven: bool
    plans_evaluated: int
    """Plans whose cost was worked out, partial plans included."""
    alternatives: tuple[Candidate, ...] = ()
    """The best configurations, each with its best split, cheapest first; where the planner ranks them."""

    @property
    def cost(self) -> float:
        """True cost of the best plan; infinite without one."""
        return float("inf") if self.best is None else self.best.cost

    @property
    def table_index(self) -> int:
        """Table of the best plan; -1 without one."""
        return -1 if self.best is None else self.best.table_index

    @property
    def plans(self) -> HardPlans | None:
        """The best plan, of length 1."""
        return None if self.best is None else self.best.plans

    def to_baseline(self, tables: Sequence[CostTable], seconds: float, note: str = "") -> BaselineResult:
        """The same for a problem; `note` replaces the sentence on how far the proof reached."""
        return BaselineResult(
            plan=None if self.best is None else self.best.to_plan(tables),
            iteration_time_s=self.cost,
            seconds=seconds,
            plans_evaluated=self.plans_evaluated,
            proven=self.proven,
            lower_bound_s=self.lower_bound,
            note=note or self._note(),
        )

    def _note(self) -> str:
        if not self.proven:
            return "stopped by its time limit; the lower bound is proven"
        return "optimal in the model" if self.best is not None else "no plan fits"
