"""Solve one problem of `compare` by every method."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TypeVar

from baselines import PLANNERS
from darts_parallel.config import SearchConfig, load_config, one_of, ranged
from darts_parallel.cost import Tables
from darts_parallel.errors import Entries
from darts_parallel.exact import TableResult, find_layerwise_plan, find_uniform_plan
from darts_parallel.gradient import GradientSearch, search_tables
from darts_parallel.planner import solve
from experiments.comparison.problems import SuiteCase
from experiments.comparison.runs import (
    AUTO,
    ORACLE,
    SEARCH,
    SPACE,
    STAGES,
    UNIFORM,
    MethodRun,
    gap,
    grouped,
    median_of,
)
from experiments.study import StudyOptions, unless_interrupted

Found = TypeVar("Found")
METHODS = (AUTO, SEARCH, UNIFORM, *PLANNERS)
EXTRA_SECONDS = 1.1
"""Seconds of a rival over those of the gradient search: equal wall-clock, and a tenth against noise."""


@dataclass
class CompareOptions(StudyOptions):
    """Command line of `python -m experiments.compare`.

    `problems=core` is a third of the suite. A rival that never ends by itself gets as many seconds as the
    gradient search took.
    """

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all of them."""
    seeds: int = ranged(5)
    """Searches of each problem, with seeds from `search.seed` on."""
    budget: float = ranged(10.0, 1e-3, 1e8)
    """Seconds of a search at most."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the gradient search; `budget` limits its seconds."""
    methods: list[str] = one_of(list(METHODS), METHODS)
    """Methods next to the oracle, which always runs."""
    oracle_seconds: float = ranged(60.0, 1e-3, 1e8)
    """Seconds after which the oracle stops with a lower bound, and a rival that ends by itself stops."""


@dataclass
class Contest:
    """Solve one problem by many methods, one after the other, and collect the rows."""

    problem: str
    tables: Tables
    runs: list[MethodRun] = field(default_factory=list)

    def search(
        self,
        settings: SearchConfig,
        seed: int,
        method: str = SEARCH,
        loop: type[GradientSearch] = GradientSearch,
    ) -> None:
        """Run the gradient search, or a control of it.

        Errors:
            KeyboardInterrupt: the user stopped it.
        """
        find = partial(search_tables, self.tables, SPACE, settings, seed, loop=loop)
        found, run = self.timed(method, seed, find)
        run = replace(run, raw_time_s=inf)
        if found is not None:
            unless_interrupted(found)
            fitting = [stage for stage in found.stages if stage.fits]
            times: Entries = {STAGES[stage.name]: stage.iteration_time_s for stage in fitting}
            run = replace(run, seconds=found.seconds, evaluations=found.plans_evaluated, **times)
        self.runs.append(run)

    def plan(
        self, method: str, planner: Callable[..., TableResult], seconds: float, **given: int
    ) -> TableResult:
        """Run another planner for at most `seconds`, with a seed in `given` where it takes one."""
        find = partial(planner, self.tables, deadline=time.monotonic() + seconds, **given)
        answer, run = self.timed(method, given.get("seed"), find)
        run = replace(run, iteration_time_s=answer.cost, evaluations=answer.plans_evaluated)
        self.runs.append(replace(run, proven=answer.proven))
        return answer

    def timed(
        self, method: str, seed: int | None, find: Callable[[], Found]
    ) -> tuple[Found, MethodRun]:
        """Return what a method finds, and a row with the seconds that it takes."""
        began = time.monotonic()
        worked = time.process_time()
        found = find()
        cpu_s = time.process_time() - worked
        took = time.monotonic() - began
        return found, MethodRun(self.problem, method, seed, inf, took, 0, cpu_s=cpu_s)


def run_case(case: SuiteCase, options: CompareOptions) -> list[MethodRun]:
    """Solve a problem by the oracle first, then by every other method.

    The oracle knows no incumbent, so nothing that the search does can influence it.
    """
    search = options.search
    contest = Contest(case.name, case.tables())
    seeds = range(search.seed, search.seed + options.seeds)
    limit = options.oracle_seconds
    oracle = contest.plan(ORACLE, partial(find_layerwise_plan, space_kind=SPACE), limit)
    if UNIFORM in options.methods:
        contest.plan(UNIFORM, find_uniform_plan, limit)
    if AUTO in options.methods:
        contest.runs.append(_auto(contest, search))
    budget = options.budget
    if SEARCH in options.methods:
        settings = replace(search, max_seconds=min(budget, search.max_seconds))
        for seed in seeds:
            contest.search(settings, seed)
        searches = grouped(contest.runs, "method")[SEARCH]
        budget = min(budget, EXTRA_SECONDS * median_of(searches, "seconds"))
    for method, rival in PLANNERS.items():
        if method not in options.methods:
            continue
        if not rival.seeded:
            contest.plan(method, rival, limit)
            continue
        for seed in seeds:
            contest.plan(method, rival, budget, seed=seed)
    reference = oracle.cost if oracle.proven else oracle.lower_bound
    return [replace(run, gap=gap(run.iteration_time_s, reference)) for run in contest.runs]


def _auto(contest: Contest, search: SearchConfig) -> MethodRun:
    find = partial(solve, contest.tables, SPACE, replace(search, method=AUTO))
    session, run = contest.timed(AUTO, None, find)
    seconds = session.best.iteration_time_s if session.best else inf
    run = replace(run, iteration_time_s=seconds, evaluations=session.found.plans_evaluated)
    return replace(run, proven=session.proven is not None)
