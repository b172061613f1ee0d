"""The result of a search."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plans import Plan

if TYPE_CHECKING:
    from darts_parallel.gradient.winner import WinnerHistory


@dataclass(frozen=True)
class SearchResult:
    """Hold the best plan, the best before polishing, and how the search went.

    Where pipelines are simulated the plans that a search begins with are polished before it descends, too.
    """

    plan: Plan
    iteration_time_s: float
    raw_plan: Plan
    raw_iteration_time_s: float
    alternatives: tuple[tuple[float, Plan], ...]
    """The best plan of every other outer choice that was visited, fastest first."""
    history: tuple[StepRecord, ...]
    seconds: float
    steps: int
    restarts: int
    seed: int
    plans_evaluated: int
    stopped_by: str | None = None
    """`user` (Ctrl-C) or `time_limit` where the search ended early; None where it ran to its end."""
    method: str = "gradient"
    """Method that found the plan: `gradient`, or an exact one."""
    winner: "WinnerHistory | None" = None
    """The restart that led at the last step, from the first step on."""
    gradient_iteration_time_s: float | None = None
    """Seconds per iteration of the gradient search's own plan, polished; None where nothing descended."""
    why: str = ""
    """Why that method, one clause; empty where it was asked for."""
    curve: tuple[tuple[float, float], ...] = ()
    """Anytime curve: seconds at which the best hard plan improved, and its seconds per iteration."""
