"""One problem on its way to a plan: its tables, and all that methods have found on them so far."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from darts_parallel.config import CostConfig, SearchConfig
from darts_parallel.cost import CostTable, build_tables, evaluate, without_dominated
from darts_parallel.exact import TableResult, Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem


@dataclass(frozen=True)
class Method:
    """A way to find or prove plans; `darts_parallel.planner.methods` lists all of them."""

    name: str
    run: Callable[["Session", float], None]
    """Solve until `time.monotonic()` is the number given, and leave what was found in the session."""
    unable: Callable[["Session"], str] = lambda session: ""
    """Say in a clause why it proves nothing here; empty where it can."""
    useless: Callable[["Session"], bool] = lambda session: False
    """Whether another method answers the same question here."""


@dataclass
class Session:
    """Tables of one problem, without strategies that others dominate, and what was found on them."""

    tables: Sequence[CostTable]
    space_kind: str
    settings: SearchConfig
    problem: Problem | None = None
    """Its own explanations where no plan fits, and its simulation, need the problem."""
    watcher: Watcher = field(default_factory=Watcher)
    methods: Mapping[str, Method] = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    """Seconds by the key that gives them."""
    result: SearchResult | None = None
    """Result of the gradient search."""
    uniform: TableResult | None = None
    """Answer of the enumeration of uniform plans; nothing enumerates them again."""
    answers: dict[str, Verification] = field(default_factory=dict)
    """Answers of the exact methods by name, in the order in which they were asked."""
    others: tuple[tuple[float, Plan], ...] = ()
    """Good plans next to the best, with their seconds."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files that a method wants written next to the plan."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of wall-clock and seconds per iteration of every improvement."""
    why: str = ""
    """Why the methods that were asked first gave no plan, a clause."""
    whole: Sequence[CostTable] = ()
    """Tables with the strategies that others dominate."""
    interrupted: bool = False
    began: float = field(default_factory=time.monotonic)

    @staticmethod
    def of(
        problem: Problem,
        methods: Mapping[str, Method],
        watcher: Watcher | None = None,
        tables: Sequence[CostTable] | None = None,
        space_kind: str = "",
    ) -> "Session":
        """Begin with a problem; without `tables` and a space with those that the problem names."""
        whole = build_tables(problem) if tables is None else tables
        if tables is None:
            tables = [without_dominated(table) for table in whole]
        config, checks = problem.config, problem.config.verification
        kind = space_kind or config.space.kind
        session = Session(tables, kind, config.search, problem, watcher or Watcher(), methods)
        session.whole = whole
        session.budgets = budgets(config.search, checks.max_seconds if checks.enabled else 0.0)
        return session

    @property
    def simulated(self) -> bool:
        """Return whether a schedule prices the plans, and no closed form."""
        return self.problem is not None and self.problem.config.cost.pipeline == "simulated"

    @property
    def best(self) -> Verification | SearchResult | None:
        """Return the fastest plan so far; the first of equals."""
        spaces = (self.space_kind, "uniform")
        found: list[Verification | SearchResult] = [] if self.result is None else [self.result]
        found += [a for a in self.answers.values() if a.plan is not None and a.space in spaces]
        return min(found, key=lambda entry: entry.iteration_time_s, default=None)

    @property
    def proven(self) -> Verification | None:
        """Return the answer that is optimal over the whole space."""
        return next(
            (a for a in self.answers.values() if a.proven and a.space == self.space_kind), None
        )

    @property
    def plans_evaluated(self) -> int:
        """Return plans that all methods priced."""
        searched = 0 if self.result is None else self.result.plans_evaluated
        return searched + sum(answer.plans_evaluated for answer in self.answers.values())

    def record(self, name: str, space: str, answer: Verification, seconds: float) -> None:
        """Keep an answer, in the place of an earlier one of the same method."""
        self.answers.pop(name, None)
        self.answers[name] = replace(answer, name=name, space=space, seconds=seconds)
        if self.best is not None:
            self.improve([(self.elapsed, self.best.iteration_time_s)])

    @property
    def elapsed(self) -> float:
        """Return the seconds of wall-clock since the session began."""
        return time.monotonic() - self.began

    def improve(self, points: Iterable[tuple[float, float]]) -> None:
        """Extend the curve by those of some points that lie below all before."""
        for at, seconds in points:
            if not self.curve or seconds < self.curve[-1][1]:
                self.curve.append((at, seconds))

    @cached_property
    def closed_form(self) -> "Session":
        """Return the same job priced by the closed form, which knows the usual schedules alone."""
        assert self.problem is not None
        usual = replace(self.problem.config.space, schedules=None)
        config = replace(self.problem.config, cost=CostConfig(), space=usual)
        return Session.of(Problem.from_config(config), self.methods)

    def price(self, plan: Plan) -> float:
        """Return the seconds of a plan by the problem's own cost model; infinite where it has none."""
        assert self.problem is not None
        named = self.problem.config.space.schedules
        if named is not None and plan.schedule_name not in named:
            return float("inf")
        cost = evaluate(plan, self.problem)
        return cost.iteration_time_s if cost.feasible else float("inf")


def budgets(settings: SearchConfig, check_seconds: float) -> dict[str, float]:
    """Return the seconds that phases of a search get, by the key that gives them."""
    return {
        "search.exact_seconds": min(settings.exact_seconds, settings.max_seconds),
        "search.max_seconds": settings.max_seconds,
        "verification.max_seconds": check_seconds,
    }
