"""What an exact baseline says of a plan."""

from dataclasses import dataclass, replace
from typing import Any

from darts_parallel.plan.strategy import Plan


@dataclass(frozen=True)
class Verification:
    """One baseline's answer beside the plan that was found."""

    name: str
    plan: Plan | None
    iteration_time_s: float
    """Seconds per iteration of the baseline's plan; `inf` without one."""
    gap: float
    """(plan found - baseline's plan) / baseline's plan; negative where the search found a better one."""
    seconds: float
    plans_evaluated: int
    proven: bool
    """The baseline's plan is optimal in the model, over the baseline's space."""
    space: str
    """Space over which it is."""
    lower_bound_s: float
    """No plan of the space is faster than this, in the model."""
    note: str
    """One sentence where the baseline did not finish or does not apply, else empty."""

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


def against(entry: Verification, found: float) -> Verification:
    """The entry with the gap of a plan that costs `found` seconds; not a number without a baseline's plan."""
    gap = found / entry.iteration_time_s - 1.0 if entry.plan is not None else float("nan")
    return replace(entry, gap=0.0 if abs(gap) < 1e-12 else gap)


def answered(name: str, space: str, answer: Any, found: float) -> Verification:
    """The entry of an exact baseline.

    Args:
        name: Of the baseline.
        space: Over which it proves something.
        answer: Its `BaselineResult`.
        found: Seconds per iteration of the plan that is verified.
    """
    entry = Verification(
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
    return against(entry, found)


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None


@dataclass(frozen=True)
class Checked:
    """What the baselines answered before they were done, or before Ctrl-C."""

    answers: list[Verification]
    interrupted: bool

    def against(self, seconds: float) -> "Checked":
        """The same with the gaps of a plan that takes `seconds`."""
        return Checked([against(entry, seconds) for entry in self.answers], self.interrupted)
