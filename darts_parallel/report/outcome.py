"""A priced plan and what is known of it: the one record that every report shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from darts_parallel.cost import CostBreakdown
from darts_parallel.errors import Amounts
from darts_parallel.exact import Verification
from darts_parallel.gradient import PlanStage, SearchResult
from darts_parallel.planner import FailureCosts, Intervals, failure_costs, intervals
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem


@dataclass(frozen=True)
class Outcome:
    """A plan of a problem, its cost, and how the plan was found and checked."""

    problem: Problem
    plan: Plan
    cost: CostBreakdown
    result: SearchResult | None = None
    """None where the plan was given and not searched."""
    answers: Sequence[Verification] = ()
    """Answers of the exact methods and the baselines."""
    elasticities: Amounts | None = None
    """Relative change of the seconds by that of a figure of the hardware; None where unknown."""
    warning: str = ""
    """Why no plan keeps the chance of running out of memory, one clause."""
    assumed: Sequence[str] = ()
    """Assumptions of the command about job and machine, each with the words that set it."""

    @cached_property
    def sure(self) -> Intervals | None:
        """Intervals of the plan's figures; None where no elasticities are known."""
        return intervals(self.plan, self.problem, self.cost, self.elasticities or {})

    @property
    def stages(self) -> list[PlanStage]:
        """Return the plans from the relaxed to the chosen one; the chosen one alone without a descent."""
        made = () if self.result is None else self.result.stages
        chosen = PlanStage("chosen", self.cost.iteration_time_s, self.cost.feasible)
        return [*made, chosen]

    @property
    def not_priced(self) -> str:
        """Parts of the model that have no price; empty where all have."""
        missing = self.problem.config.model.not_priced
        return f"not priced: {missing}" if missing else ""

    @property
    def best_known_s(self) -> float:
        """Return the seconds per iteration of the best proven or best known plan of the space."""
        times = [stage.iteration_time_s for stage in self.stages if stage.fits]
        for answer in self.answers:
            if answer.plan is not None and answer.space in (
                self.problem.config.space.kind,
                "uniform",
            ):
                times.append(answer.iteration_time_s)
        return min(times, default=inf)

    def gap(self, stage: PlanStage) -> float | None:
        """Return how far a plan is above the best known one, relative; None where it does not fit."""
        return stage.iteration_time_s / self.best_known_s - 1.0 if stage.fits else None

    @cached_property
    def failures(self) -> FailureCosts | None:
        """Cost of failures; None where they are not considered."""
        return failure_costs(self.problem, self.cost.iteration_time_s)
