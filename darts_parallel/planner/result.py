"""A verified plan, and what `plan.json` and the end of the report say with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from darts_parallel.errors import Entries
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner._session import Asked
from darts_parallel.planner.node_choice import Rental
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

CHOSEN = "chosen"
"""Name of the risk level of the plan itself."""


@dataclass(frozen=True)
class Rung:
    """A risk level: a plan between the fastest and the safest."""

    name: str
    """`fastest`, `chosen`, `simplest` or `safe`."""
    plan: Plan
    seconds: float
    """Per iteration."""
    chance: float
    """Probability that the job runs out of memory."""

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return "plan.json" if self.name == CHOSEN else f"plan_{self.name}.json"


@dataclass(frozen=True)
class Planned:
    """A plan, what the checks say of it, and where it comes from."""

    plan: Plan
    result: SearchResult | None = None
    """How it was searched; None where it was given."""
    answers: tuple[Verification, ...] = ()
    """Answers of the exact methods, in the order in which they were asked."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search or the checks."""
    rental: Rental | None = None
    """How its nodes were chosen out of an offer."""
    out_of_memory: float | None = None
    """Chance that the job runs out of memory; None where the cost model has no memory."""
    warning: str = ""
    """Changes that would help where no plan keeps that chance, one clause."""
    asked: Asked | None = field(default=None, repr=False)
    """The question that was searched; None for a given plan."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Content of the files that belong next to `plan.json`, by name."""

    @property
    def problem(self) -> Problem | None:
        """Problem that was searched, with headroom for `space.out_of_memory`; None for a given plan."""
        return None if self.asked is None else self.asked.job

    def entries(self) -> Entries:
        """Return the entries of `plan.json` next to the plan."""
        return {} if self.rental is None else {"rental": self.rental.to_dict()}
