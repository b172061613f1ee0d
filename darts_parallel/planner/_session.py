"""One job on its way to a plan: what is asked, what methods have found so far, and what is reported."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from darts_parallel.config import LEAST_SECONDS, CostConfig, SearchConfig
from darts_parallel.cost import (
    Tables,
    build_tables,
    hard_plan,
    with_memory,
    without_dominated,
)
from darts_parallel.errors import Amounts, Entries
from darts_parallel.exact import TableResult, Verification
from darts_parallel.gradient import SearchResult
from darts_parallel.planner.watcher import Watcher
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem

CHECK_SECONDS = "verification.max_seconds"
EXACT_SECONDS = "search.exact_seconds"
SEARCH_SECONDS = "search.max_seconds"
NamedPlan = tuple[float, Plan]
"""Seconds per iteration, and the plan."""


@dataclass(frozen=True)
class Asked:
    """A question: the best plan of some cost tables."""

    tables: Tables
    """Without strategies that others dominate."""
    space_kind: str
    settings: SearchConfig
    budgets: Mapping[str, float]
    """Seconds of wall-clock by the key that gives them."""
    job: Problem | None = None
    """None where cost tables are all that is known."""
    proofs: dict[float, dict[str, Verification]] = field(default_factory=dict)
    """Answers of exact methods that were asked before the search, by share of memory left free."""

    @staticmethod
    def of(problem: Problem, tables: Tables | None = None) -> "Asked":
        """Ask for a plan of a problem, over `tables` or else over the tables of its whole space."""
        config = problem.config
        if tables is None:
            tables = [without_dominated(table) for table in build_tables(problem)]
        checks = config.verification
        limits = budgets(config.search, checks.max_seconds if checks.enabled else 0.0)
        return Asked(tables, config.space.kind, config.search, limits, problem)

    def at(self, headroom: float) -> "Asked":
        """Return the question with another share of the memory left free; tables are shared."""
        problem = self.problem.leaving_free(headroom)
        cluster = problem.cluster
        margin = problem.margin
        return Asked.of(problem, [with_memory(table, cluster, margin) for table in self.tables])

    def within(self, seconds: float) -> "Asked":
        """Return the question with another limit on the seconds of the search."""
        settings = replace(self.settings, max_seconds=max(seconds, LEAST_SECONDS))
        limits = budgets(settings, self.budgets[CHECK_SECONDS])
        return replace(self, settings=settings, budgets=limits)

    @property
    def problem(self) -> Problem:
        """The job, for methods that are asked about jobs alone."""
        assert self.job is not None
        return self.job

    @property
    def simulated(self) -> bool:
        """Whether a schedule prices the plans, and no closed form."""
        return self.job is not None and self.job.config.cost.pipeline == "simulated"

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a plan, whether or not it fits."""
        return float(hard_plan(plan, self.problem)[2].iteration_time[0])

    def price(self, plan: Plan) -> float:
        """Return the seconds of a plan by the job's own cost model; infinite where it has none."""
        schedules = self.problem.config.space.schedules
        if schedules is not None and plan.schedule_name not in schedules:
            return inf
        return float(hard_plan(plan, self.problem)[2].fitting_seconds[0])


def budgets(settings: SearchConfig, check_seconds: float) -> Amounts:
    """Return the seconds that phases of a search get, by the key that gives them."""
    return {
        EXACT_SECONDS: min(settings.exact_seconds, settings.max_seconds),
        SEARCH_SECONDS: settings.max_seconds,
        CHECK_SECONDS: check_seconds,
    }


@dataclass
class Found:
    """Findings of the methods so far."""

    result: SearchResult | None = None
    """Result of the gradient search."""
    uniform: TableResult | None = None
    """Answer of the enumeration of uniform plans; nothing enumerates them again."""
    answers: dict[str, Verification] = field(default_factory=dict)
    """Answers of the exact methods by name, in the order in which they were asked."""
    others: tuple[NamedPlan, ...] = ()
    """Good plans next to the best, with their seconds."""

    @property
    def plans_evaluated(self) -> int:
        """Number of plans that all methods priced."""
        searched = 0 if self.result is None else self.result.plans_evaluated
        return searched + sum(answer.plans_evaluated for answer in self.answers.values())

    @property
    def uniform_plans(self) -> list[Plan]:
        """Plans of exact methods that have one strategy for all layers."""
        plans = []
        for answer in self.answers.values():
            if answer.plan is not None and answer.plan.within("uniform"):
                plans.append(answer.plan)
        return plans


@dataclass
class Reported:
    """Everything that a session tells besides its plans."""

    watcher: Watcher = field(default_factory=Watcher)
    files: Entries = field(default_factory=dict)
    """Files that a method wants written next to the plan."""
    why: str = ""
    """Why the methods that were asked first gave no plan, a clause."""
    interrupted: bool = False
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Method:
    """A way to find or prove plans; `darts_parallel.planner.methods` lists all of them."""

    name: str
    run: Callable[["Session", float], None]
    """Solve until `time.monotonic()` is the number given, and record the findings in the session."""
    unable: Callable[["Session"], str] = lambda session: ""
    """Say in a clause why it proves nothing here; empty where it can."""
    useless: Callable[["Session"], bool] = lambda session: False
    """Whether another method answers the same question here."""


@dataclass
class Session:
    """A question, the methods that may answer it, and their findings."""

    asked: Asked
    methods: Mapping[str, Method]
    found: Found = field(default_factory=Found)
    reported: Reported = field(default_factory=Reported)

    @property
    def best(self) -> Verification | SearchResult | None:
        """The fastest plan so far; the first of equals."""
        spaces = (self.asked.space_kind, "uniform")
        plans: list[Verification | SearchResult] = []
        if self.found.result is not None:
            plans.append(self.found.result)
        for answer in self.found.answers.values():
            if answer.plan is not None and answer.space in spaces:
                plans.append(answer)
        return min(plans, key=lambda entry: entry.iteration_time_s, default=None)

    @property
    def proven(self) -> Verification | None:
        """The answer that is optimal over the whole space."""
        for answer in self.found.answers.values():
            if answer.proven and answer.space == self.asked.space_kind:
                return answer
        return None

    def record(
        self,
        name: str,
        space: str,
        answer: Verification,
        seconds: float,
    ) -> None:
        """Keep an answer, in the place of an earlier one of the same method."""
        self.found.answers.pop(name, None)
        self.found.answers[name] = replace(answer, name=name, space=space, seconds=seconds)

    @cached_property
    def closed_form(self) -> "Session":
        """A session about the same job priced by the closed form, which knows the usual schedules alone."""
        config = self.asked.problem.config
        space = replace(config.space, schedules=None)
        closed = Problem.from_config(replace(config, cost=CostConfig(), space=space))
        return Session(Asked.of(closed), self.methods)

    def result(self, plan: Plan, seconds: float, others: Iterable[NamedPlan]) -> SearchResult:
        """Return a plan as the result of a search that took no steps."""
        took = time.monotonic() - self.reported.began
        seed = self.asked.settings.seed
        return SearchResult(
            plan,
            seconds,
            seconds,
            alternatives=tuple(others),
            seconds=took,
            seed=seed,
            plans_evaluated=self.found.plans_evaluated,
        )
