"""Solve one problem of `compare_schedules` by every method, each for equal seconds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch

from baselines import SCHEDULE_PLANNERS
from baselines._planner import Incumbent
from darts_parallel.config import SearchConfig, load_config
from darts_parallel.cost import CostTable, even_uniform_plans
from darts_parallel.exact import TableResult, simulated_lower_bound
from darts_parallel.gradient import GradientSearch
from darts_parallel.problem import LayerSpec
from experiments.comparison.controls import CONTROLS
from experiments.comparison.layouts import OWN, chunks_of, default_chunks, first_layers
from experiments.comparison.order_rivals import HEURISTIC, ORDER_LOOPS
from experiments.comparison.problems import SuiteCase
from experiments.comparison.quantiles import read_curve
from experiments.comparison.runs import (
    SEARCH,
    SPACE,
    ComparisonOptions,
    Contest,
    MethodRun,
    searched,
)

DEFAULT = "megatron_default"
PUBLISHED = "published_layout"
RULES = "rules_only"
LOOPS = {SEARCH: GradientSearch, RULES: GradientSearch} | ORDER_LOOPS | CONTROLS
"""Loops of the gradient search, and those in its place, by method."""
METHODS = (*LOOPS, DEFAULT, PUBLISHED, *SCHEDULE_PLANNERS)
PLANNER_SEEDS = 3
"""Seeds of planners that know no orders of passes: few, since they are far behind."""
COMPILE_SECONDS = 60.0
"""Seconds of a first search, in which the kernels are compiled before any clock starts."""


def short_search() -> SearchConfig:
    """Return settings of a search whose whole annealing fits into a few seconds."""
    return replace(load_config().search, num_steps=30, num_restarts=8)


@dataclass
class CompareSchedulesOptions(ComparisonOptions):
    """Command line of `python -m experiments.compare_schedules`."""

    budget: float = 4.0
    """Seconds of every run."""
    search: SearchConfig = field(default_factory=short_search)
    """Settings of the gradient search; `budget` replaces its time limit."""


def solve_case(case: SuiteCase, options: CompareSchedulesOptions) -> list[MethodRun]:
    """Solve a problem by every method; gaps are to a bound that is proven with as many seconds."""
    contest = Contest(case, options)
    tables = contest.tables
    settings = replace(options.search, max_seconds=options.budget)
    compiling = replace(settings, order_passes=1, max_seconds=COMPILE_SECONDS)
    searched(case.name, SEARCH, 0, tables, compiling)
    rules = [replace(table, pipeline=replace(table.pipeline, free=False)) for table in tables]
    for method, loop in LOOPS.items():
        seeds = contest.seeds[:1] if method == HEURISTIC else contest.seeds
        contest.search(method, seeds, settings, loop, rules if method == RULES else tables)
    for method, planner in SCHEDULE_PLANNERS.items():
        count = PLANNER_SEEDS if planner.seeded else 1
        for seed in contest.seeds[:count]:
            contest.plan(method, planner, options.budget, seed=seed)
    # steps and batches of moves are not cut: what came after the last second does not count
    for number, run in enumerate(contest.runs):
        reached = read_curve(run.curve, options.budget)
        contest.runs[number] = replace(run, iteration_time_s=reached)
    layers = case.problem.model.layers
    contest.plan(DEFAULT, LayoutPlanner(layers, ""), inf)
    if case.layout:
        contest.plan(PUBLISHED, LayoutPlanner(layers, case.layout), inf)
    best = min(run.iteration_time_s for run in contest.runs)
    deadline = time.monotonic() + options.budget
    bound = simulated_lower_bound(tables, SPACE, known=best, deadline=deadline)
    return [run.against(bound) for run in contest.runs]


@dataclass(frozen=True)
class LayoutPlanner:
    """Find the best even uniform plan whose stages are those of a layout."""

    layers: Sequence[LayerSpec]
    layout: str
    """Published layout; empty: Megatron-LM's rule."""

    def __call__(
        self, tables: Sequence[CostTable], space_kind: str, deadline: float
    ) -> TableResult:
        """Return the best plan over the tables of Megatron-LM's own schedules."""
        incumbent = Incumbent(tables, deadline, keep_all=True)
        for number, table in enumerate(tables):
            starts = self.stage_starts(table)
            if starts is not None:
                plans = even_uniform_plans(table)
                cut = torch.tensor(starts).expand_as(plans.first_layers)
                incumbent.offer(number, replace(plans, first_layers=cut))
        return incumbent.result()

    def stage_starts(self, table: CostTable) -> list[int] | None:
        """Return every stage's first layer; None where the layout is not one of this table."""
        if table.pipeline.schedule not in OWN:
            return None
        if self.layout:
            chunks: list[str] | None = chunks_of(self.layout)
        else:
            chunks = default_chunks(self.layers, table.num_stages)
        if chunks is None or len(chunks) != table.num_stages:
            return None
        return first_layers(chunks, self.layers)
