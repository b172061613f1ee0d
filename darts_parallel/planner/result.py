"""A plan with where it comes from: what `plan.json` and the end of the report say beside the plan."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from darts_parallel.gradient.result import SearchResult
from darts_parallel.plan.strategy import Plan
from darts_parallel.planner.node_choice import Rental
from darts_parallel.planner.replanning import Replanned
from darts_parallel.planner.verification import Checked
from darts_parallel.problem.problem import Problem
from darts_parallel.report.explanation import explain, render_explanation


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

    def lines(self) -> Iterator[str]:
        """What the report says of them."""
        if self.replanned is not None:
            yield f"replanned in {self.replanned.seconds:.1f} s: {self.replanned.moves.words()}"
        if self.rental is not None:
            yield self.rental.words()

    def close(self, problem: Problem, folder: Path, console: Console) -> None:
        """Print the end of the report: what else is known of the plan, and where everything lies."""
        output = problem.config.output
        lines = [*self.lines(), f"plan: {folder / 'plan.json'}"]
        if output.trace:
            lines.append(f"trace: {folder / 'plan.trace.json'} (ui.perfetto.dev opens it)")
        if output.tensorboard:
            lines.append(f"curves: tensorboard --logdir {folder / 'tensorboard'}")
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False)
        if problem.config.explain:
            render_explanation(explain(problem, self.plan), console)
