"""What a baseline reports."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from darts_parallel.cost.hard_plans import PricedPlan
from darts_parallel.cost.table import CostTable, build_tables
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem

Curve = tuple[tuple[float, float], ...]
"""An anytime curve: seconds of wall-clock, and the iteration time of the best feasible plan from then on."""


class DeadlineError(Exception):
    """The time of an exact planner is over; what it proved so far is kept."""


class Check(Protocol):
    """Asked often by an exact planner."""

    def __call__(self, labels: int = 0) -> None:
        """Raise `DeadlineError` when the time or the work is over; `labels` were made since the last call."""
        ...


def deadline_check(deadline: float | None) -> Check:
    """A check that raises `DeadlineError` once `time.monotonic()` is past `deadline`."""

    def check(labels: int = 0) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineError

    return check


@dataclass(frozen=True)
class PlannerResult:
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
    curve: Curve = ()
    """Every improvement of the best plan; empty where the planner answers once, at its end."""


OFFLOADING = "it knows no shares in host memory (space.offload); its bound has all of them away at no cost"


@dataclass(frozen=True)
class TableResult:
    """The answer of an exact planner to the tables of a problem."""

    best: PricedPlan | None
    lower_bound: float
    """Seconds; no feasible plan costs less."""
    proven: bool
    plans_evaluated: int
    """Plans whose cost was worked out, partial plans included."""
    alternatives: tuple[PricedPlan, ...] = ()
    """The best configurations, each with its best split, cheapest first; where the planner ranks them."""
    note: str = ""
    """How far the proof reaches, where the usual sentences do not say it."""
    curve: Curve = ()
    """Every improvement of the best plan; empty where the planner answers once, at its end."""

    @property
    def cost(self) -> float:
        """True cost of the best plan; infinite without one."""
        return float("inf") if self.best is None else self.best.time

    def to_baseline(self, tables: Sequence[CostTable], seconds: float, note: str = "") -> PlannerResult:
        """Read the answer for a problem; `note` replaces the sentence on how far the proof reached."""
        return PlannerResult(
            plan=None if self.best is None else self.best.to_plan(tables),
            iteration_time_s=self.cost,
            seconds=seconds,
            plans_evaluated=self.plans_evaluated,
            proven=self.proven,
            lower_bound_s=self.lower_bound,
            note=note or self._note(),
            curve=self.curve,
        )

    def _note(self) -> str:
        if self.note:
            return self.note
        if not self.proven and self.lower_bound <= 0:
            return "a heuristic: it proves nothing"
        if not self.proven:
            return "stopped by its time limit; the lower bound is proven"
        return "optimal in the model" if self.best is not None else "no plan fits"


def on_problem(
    problem: Problem,
    solve: Callable[[Sequence[CostTable], str, float | None], TableResult],
    budget: float | None,
) -> PlannerResult:
    """Answer a problem with a planner of tables; building the tables counts as its time.

    Args:
        solve: Tables, kind of space, and the `time.monotonic()` at which to stop or None, to an answer.
        budget: Seconds of wall-clock; None: as long as it takes.
    """
    began = time.monotonic()
    tables = build_tables(problem)
    built = time.monotonic() - began
    answer = solve(tables, problem.config.space.kind, None if budget is None else began + budget)
    result = answer.to_baseline(tables, time.monotonic() - began)
    return replace(result, curve=tuple((seconds + built, cost) for seconds, cost in answer.curve))
