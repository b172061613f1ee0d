"""Nodes that were chosen out of an offer, and what the report says of them."""

from dataclasses import dataclass, replace
from typing import Any

from darts_parallel.objectives import Bill
from darts_parallel.problem import Problem
from darts_parallel.records import SearchResult
from darts_parallel.strategy import Plan


@dataclass(frozen=True)
class Rental:
    """Nodes to rent, and the best uniform plan on them."""

    counts: tuple[int, ...]
    """Nodes of every node group of the offer."""
    problem: Problem
    plan: Plan
    iteration_time_s: float
    bill: Bill
    """Of the job; an empty one where the objective is time alone."""
    choices: int = 1
    """Choices of nodes that the offer allows."""

    @property
    def name(self) -> str:
        """Nodes and plan in a few words."""
        nodes = " + ".join(f"{g.count} × {g.gpus} {g.device.name}" for g in self.problem.cluster.groups)
        return f"{nodes}, {self.plan.describe(self.problem.training.global_batch_size)}"

    def words(self) -> str:
        """One line for the report."""
        return f"nodes: the best of {self.choices} choices of the offer, compared by their best uniform plans"

    def to_dict(self) -> dict[str, Any]:
        """The entry in `plan.json`."""
        return {
            "counts": list(self.counts),
            "choices": self.choices,
            "compared_by": "best uniform plan",
            "iteration_time_s": self.iteration_time_s,
        }

    def instead_of(self, result: SearchResult) -> SearchResult:
        """The search's result with this plan, which is faster."""
        return replace(
            result,
            plan=self.plan,
            iteration_time_s=self.iteration_time_s,
            method=f"{result.method}, replaced by the uniform plan that chose the nodes",
        )
