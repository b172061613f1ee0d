"""What an exact method says of a plan."""

from dataclasses import dataclass, replace
from typing import Any

from darts_parallel.exact.result import PlannerResult
from darts_parallel.plan.strategy import Plan


@dataclass(frozen=True)
class Verification:
    """One exact method's answer beside the plan that was found."""

    name: str
    plan: Plan | None
    iteration_time_s: float
    """Seconds per iteration of the method's plan; `inf` without one."""
    gap: float
    """(plan found - method's plan) / method's plan; negative where the search found a better one."""
    seconds: float
    plans_evaluated: int
    proven: bool
    """The method's plan is optimal in the model, over `space`."""
    space: str
    """Space over which the method searched."""
    lower_bound_s: float
    """No plan of the space is faster than this, in the model."""
    note: str
    """One sentence where the method did not finish or does not apply, else empty."""

    @classmethod
    def of(cls, name: str, space: str, answer: PlannerResult, found: float) -> "Verification":
        """Put an exact method's answer beside a plan.

        Args:
            name: Of the method.
            space: Over which it proves something.
            answer: What it found.
            found: Seconds per iteration of the plan that is verified.
        """
        entry = cls(
            name=name,
            plan=answer.plan,
            iteration_time_s=answer.iteration_time_s,
            gap=0.0,
            seconds=answer.seconds,
            plans_evaluated=answer.plans_evaluated,
            proven=answer.proven,
            space=space,
            lower_bound_s=answer.lower_bound_s,
            note=answer.note,
        )
        return entry.with_gap(found)

    def with_gap(self, found: float) -> "Verification":
        """Set the gap of a plan of `found` seconds; not a number where the method has no plan."""
        gap = found / self.iteration_time_s - 1.0 if self.plan is not None else float("nan")
        return replace(self, gap=0.0 if abs(gap) < 1e-12 else gap)

    def to_dict(self) -> dict[str, Any]:
        """The entry in `plan.json`."""
        return {
            "iteration_time_s": _finite(self.iteration_time_s),
            "gap": _finite(self.gap),
            "seconds": self.seconds,
            "plans_evaluated": self.plans_evaluated,
            "proven": self.proven,
            "space": self.space,
            "lower_bound_s": _finite(self.lower_bound_s),
            "note": self.note,
        }


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None
