"""A verified plan, and what `plan.json` and the end of the report say beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.result import SearchResult
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.node_choice import Rental
from darts_parallel.planner.state_moves import StateTransfer


@dataclass(frozen=True)
class Planned:
    """A plan, what the checks say of it, and where it comes from."""

    plan: Plan
    result: SearchResult | None = None
    """How it was searched; None where it was given, or enumerated by `cost=searcher` with `search=exact`."""
    answers: tuple[Verification, ...] = ()
    """Of the exact methods, in the order in which they were asked."""
    interrupted: bool = False
    """Whether Ctrl-C ended the checks."""
    moves: StateTransfer | None = None
    """Bytes that the change from an old plan moves, where this one replaces it."""
    source: str | None = None
    """File of the plan that it replaces."""
    rental: Rental | None = None
    """How its nodes were chosen out of an offer."""

    @classmethod
    def of(
        cls, result: SearchResult, answers: Sequence[Verification], *, interrupted: bool = False
    ) -> "Planned":
        """Plan of a search, with the gaps to it."""
        gaps = tuple(entry.with_gap(result.iteration_time_s) for entry in answers)
        return cls(result.plan, result, gaps, interrupted)

    def entries(self) -> dict[str, Any]:
        """What `plan.json` holds beside the plan."""
        found: dict[str, Any] = {}
        if self.moves is not None and self.result is not None:
            found["replan"] = {"from": self.source, "seconds": self.result.seconds, **self.moves.to_dict()}
        if self.rental is not None:
            found["rental"] = self.rental.to_dict()
        return found
