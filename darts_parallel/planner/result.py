"""A plan with where it comes from: what `plan.json` and the end of the report say beside the plan."""

from dataclasses import dataclass, field
from typing import Any

from darts_parallel.gradient.result import SearchResult
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.node_choice import Rental
from darts_parallel.planner.replanning import Replanned
from darts_parallel.planner.verification import Checked


@dataclass(frozen=True)
class Planned:
    """A plan, and where it comes from."""

    plan: Plan
    result: SearchResult | None = None
    """None where the plan was given, or enumerated by `cost=searcher`."""
    checked: Checked = field(default_factory=lambda: Checked([], interrupted=False))
    replanned: Replanned | None = None
    source: str | None = None
    """File of the plan that it was replanned from."""
    rental: Rental | None = None

    def entries(self) -> dict[str, Any]:
        """What `plan.json` holds beside the plan."""
        found: dict[str, Any] = {}
        if self.replanned is not None:
            moves = self.replanned.moves.to_dict()
            found["replan"] = {"from": self.source, "seconds": self.replanned.seconds, **moves}
        if self.rental is not None:
            found["rental"] = self.rental.to_dict()
        return found
