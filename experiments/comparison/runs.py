"""Solve one problem by every method: the rows of `compare.csv`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from baselines import PLANNERS
from darts_parallel.config import SearchConfig
from darts_parallel.cost import CostTable
from darts_parallel.exact import Curve, TableResult, find_layerwise_plan, find_uniform_plan
from darts_parallel.gradient import search_tables
from darts_parallel.planner import solve
from experiments.comparison.problems import SuiteCase
from experiments.comparison.quantiles import quantile
from experiments.study import unless_interrupted

ORACLE, UNIFORM, SEARCH = "dynamic_programming", "exhaustive_uniform", "gradient_search"
AUTO = "auto"
"""Order of methods of `search=auto` (`darts_parallel.planner.methods`)."""


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
    proven: bool
    """Whether the method proved its answer: optimal in the model over its own space."""
    gap: float
    """Relative distance from the oracle's proven answer, or from its lower bound where it stopped early."""
    raw_gap: float | None = None
    """Relative distance before polishing; None where a method does not polish."""
    schedule: str = ""
    """Order of passes, where it is free."""
    curve: Curve = field(default=(), repr=False)
    """Anytime curve; stands in a file of its own."""


@dataclass(frozen=True)
class CompareWork:
    """Hold what one process solves: a problem, and the settings of the methods."""

    case: SuiteCase
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    search: SearchConfig
    oracle_seconds: float
    budget: float = 10.0
    """Seconds of the gradient search at most, and of a rival that never ends by itself."""


def gap(seconds: float, reference: float) -> float:
    """Return the relative distance from `reference`; infinite where there is no plan."""
    if reference <= 0:
        return float("inf")
    return seconds / reference - 1.0


def run_case(work: CompareWork) -> list[MethodRun]:
    """Solve by the oracle first, then by every other method.

    The oracle knows no incumbent, so nothing that the search does can influence it.
    """
    torch.set_num_threads(1)
    tables = work.case.tables()
    deadline = time.monotonic() + work.oracle_seconds
    began = time.monotonic()
    oracle = find_layerwise_plan(tables, work.case.space, deadline=deadline)
    reference = oracle.cost if oracle.proven else oracle.lower_bound
    rows = [_baseline(work.case, ORACLE, oracle, time.monotonic() - began, reference)]
    if UNIFORM in work.methods:
        began = time.monotonic()
        answer = find_uniform_plan(tables, deadline=began + work.oracle_seconds)
        rows.append(_baseline(work.case, UNIFORM, answer, time.monotonic() - began, reference))
    if AUTO in work.methods:
        rows.append(_auto(work, tables, reference))
    budget = work.budget
    if SEARCH in work.methods:
        found = [_search(work, tables, seed, reference) for seed in work.seeds]
        # equal wall-clock: a rival gets what the gradient search took, a tenth more against noise
        budget = min(budget, 1.1 * quantile([run.seconds for run in found], 50))
        rows += found
    for name in (name for name in PLANNERS if name in work.methods):
        rows += _rival(work, name, tables, reference, budget)
    return rows


def _baseline(
    case: SuiteCase, method: str, answer: TableResult, seconds: float, reference: float
) -> MethodRun:
    distance = gap(answer.cost, reference)
    curve = ((seconds, answer.cost),) if answer.best is not None else ()
    return MethodRun(case.name, method, None, answer.cost, seconds, answer.plans_evaluated, answer.proven,
                     distance, curve=curve)  # fmt: skip


def _auto(work: CompareWork, tables: Sequence[CostTable], reference: float) -> MethodRun:
    began, settings = time.monotonic(), replace(work.search, method=AUTO, seed=work.seeds[0])
    answer = solve(tables, work.case.space, settings, AUTO)
    found = answer.iteration_time_s
    return MethodRun(work.case.name, AUTO, None, found, time.monotonic() - began, answer.plans_evaluated,
               answer.proven, gap(found, reference), curve=answer.curve)  # fmt: skip


def _rival(
    work: CompareWork, name: str, tables: Sequence[CostTable], reference: float, budget: float
) -> list[MethodRun]:
    """Run a rival with every seed, or once; what never ends by itself has `budget`."""
    rival, runs = PLANNERS[name], []
    for seed in work.seeds if rival.seeded else (None,):
        began = time.monotonic()
        deadline = began + (budget if rival.seeded else work.oracle_seconds)
        answer = rival(tables, work.case.space, deadline=deadline, seed=seed or 0)
        runs.append(MethodRun(
            work.case.name, name, seed, answer.cost, time.monotonic() - began, answer.plans_evaluated, False,
            gap(answer.cost, reference), curve=answer.curve,
        ))  # fmt: skip
    return runs


def _search(work: CompareWork, tables: Sequence[CostTable], seed: int, reference: float) -> MethodRun:
    began = time.monotonic()
    limit = min(work.budget, work.search.max_seconds)
    result = search_tables(tables, work.case.space, replace(work.search, max_seconds=limit), seed)
    if result is None:
        seconds, none = time.monotonic() - began, float("inf")
        return MethodRun(work.case.name, SEARCH, seed, none, seconds, 0, False, none, none)
    unless_interrupted(result)
    return MethodRun(
        problem=work.case.name,
        method=SEARCH,
        seed=seed,
        iteration_time_s=result.iteration_time_s,
        seconds=result.seconds,
        evaluations=result.plans_evaluated,
        proven=False,
        gap=gap(result.iteration_time_s, reference),
        raw_gap=gap(result.raw_iteration_time_s, reference),
        curve=result.curve,
    )
