"""Solve one problem of `compare` by every method."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baselines import PLANNERS
from darts_parallel.config import SearchConfig, require_at_least, require_members
from darts_parallel.cost import CostTable
from darts_parallel.exact import TableResult, find_layerwise_plan, find_uniform_plan
from darts_parallel.planner import solve
from experiments.comparison.problems import SuiteCase
from experiments.comparison.runs import (
    AUTO,
    ORACLE,
    SEARCH,
    SPACE,
    UNIFORM,
    ComparisonOptions,
    Contest,
    MethodRun,
    grouped,
    median_of,
)

METHODS = (AUTO, SEARCH, UNIFORM, *PLANNERS)
EXTRA_SECONDS = 1.1
"""Seconds of a rival over those of the gradient search: equal wall-clock, and a tenth against noise."""


@dataclass
class CompareOptions(ComparisonOptions):
    """Command line of `python -m experiments.compare`.

    `problems=core` is a third of the suite. A rival that never ends by itself gets as many seconds as the
    gradient search took.
    """

    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """Methods next to the oracle, which always runs."""
    oracle_seconds: float = 60.0
    """Seconds after which the oracle stops with a lower bound, and a rival that ends by itself stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("oracle_seconds", self.oracle_seconds, 0, strict=True)
        require_members("methods", self.methods, METHODS)


def run_case(case: SuiteCase, options: CompareOptions) -> list[MethodRun]:
    """Solve a problem by the oracle first, then by every other method.

    The oracle knows no incumbent, so nothing that the search does can influence it.
    """
    contest = Contest(case, options)
    limit = options.oracle_seconds
    oracle = contest.plan(ORACLE, find_layerwise_plan, limit)
    if UNIFORM in options.methods:
        contest.plan(UNIFORM, _uniform_plan, limit)
    if AUTO in options.methods:
        contest.runs.append(_auto(contest, options.search))
    budget = options.budget
    if SEARCH in options.methods:
        settings = replace(options.search, max_seconds=min(budget, options.search.max_seconds))
        contest.search(SEARCH, contest.seeds, settings)
        searches = grouped(contest.runs, "method")[SEARCH]
        budget = min(budget, EXTRA_SECONDS * median_of(searches, "seconds"))
    for method, rival in PLANNERS.items():
        if method not in options.methods:
            continue
        if not rival.seeded:
            contest.plan(method, rival, limit)
            continue
        for seed in contest.seeds:
            contest.plan(method, rival, budget, seed=seed)
    reference = oracle.cost if oracle.proven else oracle.lower_bound
    return [run.against(reference) for run in contest.runs]


def _uniform_plan(tables: Sequence[CostTable], space: str, deadline: float) -> TableResult:
    return find_uniform_plan(tables, deadline=deadline)


def _auto(contest: Contest, search: SearchConfig) -> MethodRun:
    began = time.monotonic()
    found = solve(contest.tables, SPACE, replace(search, method=AUTO), AUTO)
    return MethodRun(
        contest.case.name,
        AUTO,
        None,
        found.iteration_time_s,
        time.monotonic() - began,
        found.plans_evaluated,
        found.proven,
        curve=found.curve,
    )
