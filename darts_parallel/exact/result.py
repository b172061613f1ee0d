"""Answers of planners: on the tables of a problem, and as a check of a plan that was found."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from typing import Protocol

from darts_parallel.cost import COST_TOLERANCE, GAIN_TOLERANCE, CostTable, PricedPlan, Tables
from darts_parallel.errors import Entries
from darts_parallel.plans import Plan

OFFLOADING = "it knows no shares in host memory (space.offload); its bound assumes free offloading"
"""Note of exact methods on problems with offloading."""
OWN_TERM = "it knows no own terms (cost.term); its bound is without them"
"""Note of exact methods on problems with cost terms of the user's own."""
TOO_LARGE = "not proven: too many possible stages at"
"""Begins the note that names pipeline configurations that exact methods left out."""
LATE = "; its time limit ended the search of the others"
"""Ends the same note where the clock ended the proof, too."""
USEFUL_SLACK = 0.05
"""Relative distance of a plan from a lower bound above which the bound is not useful: good schedules of one
problem differ by less."""


class DeadlineError(Exception):
    """The time of an exact planner is over; what it proved so far is kept."""


class Check(Protocol):
    """Asked often by an exact planner."""

    def __call__(self, labels: int = 0) -> None:
        """Raise `DeadlineError` when the time or the work is over; `labels` were made since the last call."""
        ...


def deadline_check(deadline: float) -> Check:
    """Return a check that raises `DeadlineError` once `time.monotonic()` is past `deadline`."""

    def check(labels: int = 0) -> None:
        if time.monotonic() > deadline:
            raise DeadlineError

    return check


def unknown_costs(tables: Iterable[CostTable]) -> str:
    """Name costs that exact methods do not know and only bound; empty if there are none."""
    for table in tables:
        if table.host is not None:
            return OFFLOADING
        if table.own is not None:
            return OWN_TERM
    return ""


def too_large_note(parts: Iterable[tuple[CostTable, int]], late: bool) -> str:
    """Name tables and outer choices that are too large to solve; empty without any.

    Args:
        late: The time ended before the others were solved.
    """
    micro_batches: dict[int, set[int]] = {}
    for table, outer in parts:
        count = int(table.num_micro_batches[outer])
        micro_batches.setdefault(table.pp, set()).add(count)
    names = []
    for pp, counts in sorted(micro_batches.items()):
        listed = ", ".join(map(str, sorted(counts)))
        names.append(f"pp={pp} (micro-batches: {listed})")
    return f"{TOO_LARGE} {' and '.join(names)}{LATE * late}" if names else ""


@dataclass(frozen=True)
class TableResult:
    """The answer of a planner to the tables of a problem."""

    best: PricedPlan | None
    lower_bound: float
    """Seconds; no feasible plan costs less."""
    proven: bool
    """Whether `best` is optimal in the model, or, without a plan, none is feasible."""
    plans_evaluated: int
    """Plans whose cost was worked out, partial plans included."""
    alternatives: tuple[PricedPlan, ...] = ()
    """The best configurations, each with its best split, cheapest first; where the planner ranks them."""
    note: str = ""
    """How far the proof reaches, where the usual sentences do not say it."""

    @property
    def cost(self) -> float:
        """Return the true cost of the best plan; infinite without one."""
        return inf if self.best is None else self.best.time

    def verification(self, tables: Tables) -> "Verification":
        """Put the answer in terms of the problem, without name, space and seconds of the method."""
        plan = None if self.best is None else self.best.to_plan(tables)
        note = self.note or self._usual_note()
        return Verification(
            "",
            plan,
            self.cost,
            plans_evaluated=self.plans_evaluated,
            proven=self.proven,
            lower_bound_s=self.lower_bound,
            note=note,
        )

    def _usual_note(self) -> str:
        if not self.proven and self.lower_bound <= 0:
            return "a heuristic: it proves nothing"
        if not self.proven:
            return "stopped by its time limit; the lower bound is proven"
        return "optimal in the model" if self.best is not None else "no plan fits"


@dataclass(frozen=True)
class Verification:
    """The answer of a method to a problem, next to the plan that was found."""

    name: str
    """Name of the method."""
    plan: Plan | None
    """Best plan of the method; none where it has none."""
    iteration_time_s: float
    """Seconds per iteration of the method's plan; `inf` without one."""
    gap: float = nan
    """(plan found - method's plan) / method's plan; negative where the search found a better one."""
    seconds: float = 0.0
    """Seconds of wall-clock of the method."""
    plans_evaluated: int = 0
    proven: bool = False
    """Whether the method's plan is optimal in the model, over `space`; without a plan, none is feasible."""
    space: str = ""
    """Space over which the method searched."""
    lower_bound_s: float = 0.0
    """Seconds; no plan of the space is faster than this, in the model."""
    note: str = ""
    """One sentence on how far the proof reaches."""

    def contradicted(self, found: float) -> bool:
        """Return whether `found` seconds, of a plan in its space, are below the proven lower bound."""
        floor = self.iteration_time_s if self.proven else self.lower_bound_s
        return found < max(floor, self.lower_bound_s) * (1 - COST_TOLERANCE)

    def withdrawn(self) -> "Verification":
        """Return the answer without a proof, which a plan has contradicted."""
        note = "withdrawn: a plan is below its bound"
        return replace(self, proven=False, lower_bound_s=0.0, note=note)

    def with_gap(self, found: float) -> "Verification":
        """Set the gap of a plan of `found` seconds; not a number where the method has no plan."""
        if self.plan is None:
            return replace(self, gap=nan)
        gap = found / self.iteration_time_s - 1.0
        return replace(self, gap=0.0 if abs(gap) < GAIN_TOLERANCE else gap)

    def to_dict(self) -> Entries:
        """Return the entry in `plan.json`."""
        entry = dict(vars(self))
        del entry["name"], entry["plan"]
        for name in ("iteration_time_s", "gap", "lower_bound_s"):
            entry[name] = entry[name] if isfinite(entry[name]) else None
        return entry
