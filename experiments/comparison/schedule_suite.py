"""Solve problems whose schedule is free by every method at equal seconds."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from baselines import SCHEDULE_PLANNERS
from baselines._planner import Incumbent
from darts_parallel.config import SearchConfig, load_config, require_at_least
from darts_parallel.cost import CostTable, even_uniform_plans
from darts_parallel.exact import USEFUL_SLACK, TableResult, simulated_lower_bound
from darts_parallel.gradient import GradientSearch
from darts_parallel.report import markdown_table
from experiments.comparison.controls import CONTROLS
from experiments.comparison.layouts import OWN, chunks_of, default_chunks, first_layers
from experiments.comparison.order_rivals import HEURISTIC, ORDER_LOOPS
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.runs import SEARCH, SPACE, MethodRun, answered, searched
from experiments.comparison.schedule_problems import ScheduleCase
from experiments.study import StudyOptions

DEFAULT, PUBLISHED = "megatron_default", "published_layout"
RULES = "rules_only"
METHODS = (SEARCH, RULES, *ORDER_LOOPS, *CONTROLS, DEFAULT, PUBLISHED, *SCHEDULE_PLANNERS)
PLANNER_SEEDS = 3
"""Seeds of planners that know no orders of passes, at most."""
EQUAL = 1e-3
"""Relative distance up to which two plans count as equally good."""


SHORT: dict[str, Any] = {"num_steps": 30, "num_restarts": 8, "polish_starts": 4}
"""Settings of a search whose whole annealing fits into a few seconds."""


@dataclass
class CompareSchedulesOptions(StudyOptions):
    """Command line of `python -m experiments.compare_schedules`."""

    problems: list[str] = field(default_factory=list)
    """Parts of problem names; none: all of them."""
    seeds: int = 5
    """Number of seeds, from `search.seed` on."""
    budget: float = 4.0
    """Seconds of every run."""
    search: SearchConfig = field(default_factory=lambda: replace(load_config().search, **SHORT))
    """Settings of the gradient search: those of conf/ but for few steps; `budget` replaces its time limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("seeds", self.seeds, 1)
        require_at_least("budget", self.budget, 0, strict=True)


def solve_case(case: ScheduleCase, options: CompareSchedulesOptions) -> list[MethodRun]:
    """Solve a problem by every method; gaps are to a bound that is proven with as many seconds."""
    torch.set_num_threads(1)
    tables, search = case.tables(), options.search
    seeds = range(search.seed, search.seed + options.seeds)
    config = replace(search, max_seconds=options.budget)
    loops = {SEARCH: GradientSearch, RULES: GradientSearch} | ORDER_LOOPS | CONTROLS
    rules = [replace(table, pipeline=replace(table.pipeline, free=False)) for table in tables]
    # the kernels are compiled before any clock starts
    searched(
        case.name,
        SEARCH,
        0,
        tables,
        replace(config, order_passes=1, max_seconds=60.0),
        GradientSearch,
    )
    runs = [
        searched(case.name, method, seed, rules if method == RULES else tables, config, loop)
        for method, loop in loops.items()
        for seed in (seeds[:1] if method == HEURISTIC else seeds)
    ]
    for method, planner in SCHEDULE_PLANNERS.items():
        for seed in seeds[:PLANNER_SEEDS] if planner.seeded else seeds[:1]:
            began = time.monotonic()
            found = planner(tables, SPACE, deadline=began + options.budget, seed=seed)
            runs.append(_answered(case, method, seed, tables, found, began))
    # steps and batches of moves are not cut: what came after the last second does not count
    runs = [replace(run, iteration_time_s=read_curve(run.curve, options.budget)) for run in runs]
    runs += _fixed(case, tables)
    best = min(run.iteration_time_s for run in runs)
    deadline = time.monotonic() + options.budget
    bound = simulated_lower_bound(tables, SPACE, known=best, deadline=deadline)
    return [run.against(bound) for run in runs]


def _answered(
    case: ScheduleCase,
    method: str,
    seed: int,
    tables: Sequence[CostTable],
    found: TableResult,
    began: float,
) -> MethodRun:
    schedule = "" if found.best is None else tables[found.best.table].pipeline.schedule
    return answered(case.name, method, seed, found, began, schedule)


def _fixed(case: ScheduleCase, tables: Sequence[CostTable]) -> Iterator[MethodRun]:
    """Yield the best plans with the stages of Megatron-LM's rule, and with those that NVIDIA publishes."""
    layers = case.problem.model.layers
    for name in (DEFAULT, PUBLISHED):
        incumbent = Incumbent(tables, None, keep_all=True)
        for number, table in enumerate(tables):
            chunks = (
                chunks_of(case.layout)
                if name == PUBLISHED
                else default_chunks(layers, table.num_stages)
            )
            if table.pipeline.schedule in OWN and chunks and len(chunks) == table.num_stages:
                starts = first_layers(chunks, layers)
                if starts is not None:
                    plans = even_uniform_plans(table)
                    cut = torch.tensor(starts).expand_as(plans.first_layers)
                    incumbent.offer(number, replace(plans, first_layers=cut))
        if name == DEFAULT or case.layout:
            yield _answered(case, name, 0, tables, incumbent.result(), incumbent.began)


def medians(runs: Sequence[MethodRun]) -> dict[str, dict[str, float]]:
    """Return by problem and method the median gap over seeds to the best plan of all methods."""
    gaps: dict[str, dict[str, float]] = {}
    for problem in dict.fromkeys(run.problem for run in runs):
        mine = [run for run in runs if run.problem == problem]
        best = min(run.iteration_time_s for run in mine)
        gaps[problem] = {
            method: quantile([r.iteration_time_s for r in mine if r.method == method], 50) / best
            - 1.0
            for method in METHODS
            if any(run.method == method for run in mine)
        }
    return gaps


def gaps_table(runs: Sequence[MethodRun]) -> list[str]:
    """Return a line for each problem: the median gap of every method, the best plan, the proven bound."""
    lines = []
    for problem, gaps in medians(runs).items():
        mine = [run for run in runs if run.problem == problem]
        best = min(mine, key=lambda run: run.iteration_time_s)
        cells = [_percent(gaps[method]) if method in gaps else "-" for method in METHODS]
        bound = best.iteration_time_s / (1.0 + best.gap)
        ends = (
            best.schedule,
            f"{best.iteration_time_s:.4g} s",
            f"{bound:.4g} s",
            _percent(best.gap) if best.gap <= USEFUL_SLACK else "no useful bound",
        )
        lines.append((problem, *cells, *ends))
    header = ("problem", *METHODS, "best schedule", "best plan", "proven bound", "within")
    return markdown_table(header, lines)


def verdict(runs: Sequence[MethodRun]) -> list[str]:
    """Say where the gradient search is best or equal, where a rival is better, and what controls do."""
    gaps = medians(runs)
    others = {
        name: {m: g - row[SEARCH] for m, g in row.items() if m != SEARCH}
        for name, row in gaps.items()
    }
    rivals = {
        name: {m: by for m, by in row.items() if m not in CONTROLS} for name, row in others.items()
    }
    better = {name: [m for m, by in row.items() if by < -EQUAL] for name, row in rivals.items()}
    ties = [name for name, row in rivals.items() if not better[name] and min(row.values()) <= EQUAL]
    good = sum(not methods for methods in better.values())
    lines = [
        f"- The gradient search's median plan is the best or equal on {good} of {len(gaps)} problems."
    ]
    lines += [
        f"- {name}: better are {', '.join(methods)}." for name, methods in better.items() if methods
    ]
    lines += [f"- A rival ties on: {', '.join(ties)}."] if ties else []
    for control in CONTROLS:
        by = [row[control] for row in others.values()]
        equal, worse = sum(abs(gap) <= EQUAL for gap in by), sum(gap > EQUAL for gap in by)
        lines.append(
            f"- `{control}`: a median plan equal to the search's (within {EQUAL:.1%}) on {equal} of "
            f"{len(by)} problems, slower on {worse}, faster on {len(by) - equal - worse}."
        )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < float("inf") else "no plan"
