"""Solve one problem by every method: the rows of a comparison."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from baselines import PLANNERS
from darts_parallel.config import SearchConfig, load_config, require_at_least, require_members
from darts_parallel.cost import CostTable
from darts_parallel.exact import Curve, TableResult, find_layerwise_plan, find_uniform_plan
from darts_parallel.gradient import GradientSearch, search_tables
from darts_parallel.planner import solve
from experiments.comparison.problems import SuiteCase
from experiments.comparison.quantiles import quantile
from experiments.study import StudyOptions, unless_interrupted

ORACLE, UNIFORM, SEARCH = "dynamic_programming", "exhaustive_uniform", "gradient_search"
SPACE = "layerwise"
AUTO = "auto"
"""Order of methods of `search=auto` (`darts_parallel.planner.methods`)."""


METHODS = (AUTO, SEARCH, UNIFORM, *PLANNERS)


@dataclass
class CompareOptions(StudyOptions):
    """Command line of `python -m experiments.compare`."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: the whole suite; `core`: a third of it."""
    seeds: int = 5
    """Searches of each problem, with seeds from `search.seed` on."""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """Methods next to the oracle, which always runs."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the search, from conf/."""
    oracle_seconds: float = 60.0
    """Seconds after which the oracle stops with a lower bound, and a rival that ends by itself is stopped."""
    budget: float = 10.0
    """Seconds of the gradient search at most; a rival that never ends by itself gets as many as that took."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)
        require_at_least("oracle_seconds", self.oracle_seconds, 0, strict=True)
        require_members("methods", self.methods, METHODS)


@dataclass(frozen=True)
class MethodRun:
    """Hold what one method found on one problem with one seed: a row of a comparison."""

    problem: str
    method: str
    seed: int | None
    """None where nothing is random."""
    iteration_time_s: float
    """Seconds per iteration of the method's best plan; infinite without one."""
    seconds: float
    evaluations: int
    proven: bool = False
    """Whether the method proved its answer: optimal in the model over its own space."""
    raw_time_s: float | None = None
    """Seconds per iteration before polishing; None where a method does not polish."""
    schedule: str = ""
    """Order of passes, where it is free."""
    curve: Curve = field(default=(), repr=False)
    """Anytime curve; stands in a file of its own."""
    gap: float = float("inf")
    """Relative distance from the oracle's proven answer, or from its lower bound where it stopped early."""
    raw_gap: float | None = None
    """Relative distance before polishing."""

    def against(self, reference: float) -> "MethodRun":
        """Return the row with its distances from `reference`, seconds per iteration."""
        raw = None if self.raw_time_s is None else gap(self.raw_time_s, reference)
        return replace(self, gap=gap(self.iteration_time_s, reference), raw_gap=raw)


def gap(seconds: float, reference: float) -> float:
    """Return the relative distance from `reference`; infinite where there is no plan."""
    return seconds / reference - 1.0 if reference > 0 else float("inf")


def answered(
    problem: str,
    method: str,
    seed: int | None,
    answer: TableResult,
    began: float,
    schedule: str = "",
) -> MethodRun:
    """Return the row of an answer that was asked for at `began`, by `time.monotonic`."""
    seconds = time.monotonic() - began
    curve = answer.curve or (() if answer.best is None else ((seconds, answer.cost),))
    return MethodRun(
        problem,
        method,
        seed,
        answer.cost,
        seconds,
        answer.plans_evaluated,
        answer.proven,
        schedule=schedule,
        curve=curve,
    )


def searched(
    problem: str,
    method: str,
    seed: int,
    tables: Sequence[CostTable],
    settings: SearchConfig,
    loop: type[GradientSearch] = GradientSearch,
) -> MethodRun:
    """Run the gradient search, or a loop in its place.

    Errors:
        KeyboardInterrupt: the user stopped it.
    """
    began = time.monotonic()
    found = search_tables(tables, SPACE, settings, seed, loop=loop)
    if found is None:
        none = float("inf")
        return MethodRun(problem, method, seed, none, time.monotonic() - began, 0, raw_time_s=none)
    unless_interrupted(found)
    return MethodRun(
        problem,
        method,
        seed,
        found.iteration_time_s,
        found.seconds,
        found.plans_evaluated,
        raw_time_s=found.raw_iteration_time_s,
        schedule=found.plan.schedule_name,
        curve=found.curve,
    )


def run_case(case: SuiteCase, options: CompareOptions) -> list[MethodRun]:
    """Solve a problem by the oracle first, then by every other method.

    The oracle knows no incumbent, so nothing that the search does can influence it.
    """
    torch.set_num_threads(1)
    name, tables, search = case.name, case.tables(), options.search
    seeds = range(search.seed, search.seed + options.seeds)
    began = time.monotonic()
    oracle = find_layerwise_plan(tables, SPACE, deadline=began + options.oracle_seconds)
    runs = [answered(name, ORACLE, None, oracle, began)]
    if UNIFORM in options.methods:
        began = time.monotonic()
        uniform = find_uniform_plan(tables, deadline=began + options.oracle_seconds)
        runs.append(answered(name, UNIFORM, None, uniform, began))
    if AUTO in options.methods:
        began, settings = time.monotonic(), replace(search, method=AUTO, seed=seeds[0])
        auto = solve(tables, SPACE, settings, AUTO)
        runs.append(
            MethodRun(
                name,
                AUTO,
                None,
                auto.iteration_time_s,
                time.monotonic() - began,
                auto.plans_evaluated,
                auto.proven,
                curve=auto.curve,
            )
        )
    budget = options.budget
    if SEARCH in options.methods:
        settings = replace(search, max_seconds=min(budget, search.max_seconds))
        found = [searched(name, SEARCH, seed, tables, settings) for seed in seeds]
        # equal wall-clock: a rival gets what the gradient search took, a tenth more against noise
        budget = min(budget, 1.1 * quantile([run.seconds for run in found], 50))
        runs += found
    for method, rival in PLANNERS.items():
        for seed in (seeds if rival.seeded else (None,)) if method in options.methods else ():
            began = time.monotonic()
            limit = budget if rival.seeded else options.oracle_seconds
            answer = rival(tables, SPACE, deadline=began + limit, seed=seed or 0)
            runs.append(answered(name, method, seed, answer, began))
    reference = oracle.cost if oracle.proven else oracle.lower_bound
    return [run.against(reference) for run in runs]
