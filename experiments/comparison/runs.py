"""Rows of a comparison: what one method found on one problem with one seed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch

from darts_parallel.config import SearchConfig, load_config, require_at_least
from darts_parallel.cost import CostTable
from darts_parallel.exact import Curve, TableResult
from darts_parallel.gradient import GradientSearch, search_tables
from experiments.comparison.problems import SuiteCase
from experiments.comparison.quantiles import quantile
from experiments.study import StudyOptions, unless_interrupted

ORACLE = "dynamic_programming"
UNIFORM = "exhaustive_uniform"
SEARCH = "gradient_search"
SPACE = "layerwise"
Loop = type[GradientSearch]
AUTO = "auto"
"""Order of methods of `search=auto` (`darts_parallel.planner.methods`)."""


@dataclass
class ComparisonOptions(StudyOptions):
    """Hold the options that both comparisons have."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all of them."""
    seeds: int = 5
    """Searches of each problem, with seeds from `search.seed` on."""
    budget: float = 10.0
    """Seconds of a search at most."""
    search: SearchConfig = field(default_factory=lambda: load_config().search)
    """Settings of the gradient search; `budget` limits its seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)


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
    """Pipeline schedule of the best plan, where the method names it."""
    curve: Curve = field(default=(), repr=False)
    """Anytime curve; stands in a file of its own."""
    gap: float = inf
    """Relative distance from the proven optimum, or from a lower bound where the proof stopped."""

    def against(self, reference: float) -> "MethodRun":
        """Return the row with its distance from `reference`, seconds per iteration."""
        return replace(self, gap=gap(self.iteration_time_s, reference))


def gap(seconds: float, reference: float) -> float:
    """Return the relative distance from `reference`; infinite where there is no plan."""
    if reference <= 0:
        return inf
    return seconds / reference - 1.0


def searched(
    problem: str,
    method: str,
    seed: int,
    tables: Sequence[CostTable],
    settings: SearchConfig,
    loop: Loop = GradientSearch,
) -> MethodRun:
    """Run the gradient search, or a loop in its place.

    Errors:
        KeyboardInterrupt: the user stopped it.
    """
    began = time.monotonic()
    found = search_tables(tables, SPACE, settings, seed, loop=loop)
    if found is None:
        return MethodRun(problem, method, seed, inf, time.monotonic() - began, 0, raw_time_s=inf)
    unless_interrupted(found)
    seconds = found.iteration_time_s
    run = MethodRun(problem, method, seed, seconds, found.seconds, found.plans_evaluated)
    fitted = next(stage for stage in found.stages if stage.name == "fitted")
    raw = fitted.iteration_time_s
    return replace(run, raw_time_s=raw, schedule=found.plan.schedule_name, curve=found.curve)


class Contest:
    """Solve one problem by many methods, one after the other, and collect the rows."""

    def __init__(self, case: SuiteCase, options: ComparisonOptions) -> None:
        torch.set_num_threads(1)
        self.case = case
        self.tables = case.tables()
        self.seeds = range(options.search.seed, options.search.seed + options.seeds)
        self.runs: list[MethodRun] = []

    def search(
        self,
        method: str,
        seeds: Sequence[int],
        settings: SearchConfig,
        loop: Loop = GradientSearch,
        tables: Sequence[CostTable] = (),
    ) -> None:
        """Run the gradient search with several seeds, or a loop in its place."""
        for seed in seeds:
            run = searched(self.case.name, method, seed, tables or self.tables, settings, loop)
            self.runs.append(run)

    def plan(
        self, method: str, planner: Callable[..., TableResult], seconds: float, **given: int
    ) -> TableResult:
        """Run another planner for at most `seconds`, with a seed in `given` where it takes one."""
        began = time.monotonic()
        answer = planner(self.tables, SPACE, deadline=began + seconds, **given)
        took = time.monotonic() - began
        seed = given.get("seed")
        plans = answer.plans_evaluated
        run = MethodRun(self.case.name, method, seed, answer.cost, took, plans, answer.proven)
        if answer.best is not None:
            schedule = self.tables[answer.best.table].pipeline.schedule
            run = replace(run, schedule=schedule, curve=answer.curve or ((took, answer.cost),))
        self.runs.append(run)
        return answer


def grouped(runs: Sequence[MethodRun], name: str) -> dict[str, list[MethodRun]]:
    """Group rows by the field `name`, in their order."""
    groups: dict[str, list[MethodRun]] = {}
    for run in runs:
        groups.setdefault(getattr(run, name), []).append(run)
    return groups


def median_of(runs: Sequence[MethodRun], name: str) -> float:
    """Return the median of the field `name`."""
    return quantile([float(getattr(run, name)) for run in runs], 50)


def median_time(runs: Sequence[MethodRun]) -> float:
    """Return the median seconds per iteration of the plans."""
    return median_of(runs, "iteration_time_s")


def best_known(runs: Sequence[MethodRun]) -> dict[str, float]:
    """Return the least seconds per iteration of each problem that any method found."""
    groups = grouped(runs, "problem").items()
    return {name: min(run.iteration_time_s for run in rows) for name, rows in groups}
