"""What every rival of the literature offers, and how it answers a problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from darts_parallel.cost.table import CostTable
from darts_parallel.errors import UnsupportedError
from darts_parallel.exact.result import PlannerResult, TableResult, on_problem
from darts_parallel.problem.problem import Problem


class FindPlan(Protocol):
    """A planner of problems."""

    def __call__(self, problem: Problem, *, budget: float | None = None, seed: int = 0) -> PlannerResult:
        """Answer a problem.

        Args:
            problem: Model, cluster, job and space.
            budget: Seconds of wall-clock; None: as long as it takes, or `incumbent.DEFAULT_SECONDS` for a
                planner that never ends by itself.
            seed: Of all random numbers; ignored where nothing is random.
        """


def on_problems(solve: Callable[..., TableResult]) -> FindPlan:
    """Return the planner of problems that a planner of cost tables makes.

    Args:
        solve: Takes tables, the kind of space, and by keyword `deadline` (a `time.monotonic()` or None) and
            `seed`.
    """

    def find_plan(problem: Problem, *, budget: float | None = None, seed: int = 0) -> PlannerResult:
        return on_problem(
            problem,
            lambda tables, space_kind, end: solve(tables, space_kind, deadline=end, seed=seed),
            budget,
        )

    return find_plan


@dataclass(frozen=True)
class Planner:
    """A rival: one module of `baselines/`, one paper."""

    name: str
    """Of its module."""
    seeded: bool = False
    """It draws random numbers and never ends by itself: it gets every seed, and the budget."""
    extra: str = ""
    """Extra of the project that it needs."""
    layerwise: bool = False
    """Its plans may differ from layer to layer; the others' are uniform."""

    def solve(
        self, tables: Sequence[CostTable], space_kind: str, *, deadline: float | None = None, seed: int = 0
    ) -> TableResult:
        """Return the best plan until `deadline`, a `time.monotonic()`.

        Args:
            tables: One for each pipeline degree.
            space_kind: `uniform`, `stagewise` or `layerwise`.
            deadline: When to stop; None: as long as it takes.
            seed: Of all random numbers.

        Errors:
            UnsupportedError: its extra is not installed.
        """
        try:
            module = import_module(f"baselines.{self.name}")
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"methods={self.name} needs {error.name}; nearest legal: pip install "
                f"'darts-parallel[{self.extra}]', or methods without it."
            ) from None
        answer: TableResult = module.solve(tables, space_kind, deadline=deadline, seed=seed)
        return answer
