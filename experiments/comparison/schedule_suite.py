"""Every method at equal seconds on problems whose schedule is free."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baselines import SCHEDULE_PLANNERS
from baselines.incumbent import Incumbent
from darts_parallel.config.search import SearchConfig
from darts_parallel.cost.table import CostTable
from darts_parallel.exact.result import Curve, TableResult
from darts_parallel.exact.schedule_bounds import simulated_lower_bound
from darts_parallel.gradient.descent import search_tables
from darts_parallel.report.tables import csv_text, markdown_table
from experiments.comparison.interruption import unless_interrupted
from experiments.comparison.layouts import OWN, chunks_of, default_chunks, first_layers, uniform_plans
from experiments.comparison.quantiles import quantile, read_curve
from experiments.comparison.schedule_problems import ScheduleCase

SEARCH = "gradient_search"
DEFAULT = "megatron_default"
PUBLISHED = "published_layout"
METHODS = (SEARCH, DEFAULT, PUBLISHED, *SCHEDULE_PLANNERS)
EQUAL = 1e-3
"""Relative distance up to which two plans count as equally good."""


@dataclass(frozen=True)
class Answer:
    """One method on one problem with one seed."""

    problem: str
    method: str
    seed: int
    seconds_per_iteration: float
    """Of the best plan that it had when the seconds of every method were over; infinite without one."""
    schedule: str
    seconds: float
    evaluated: int
    curve: Curve = ()


@dataclass(frozen=True)
class Solved:
    """All answers to one problem, and a proven bound."""

    case: ScheduleCase
    answers: tuple[Answer, ...]
    bound: float

    @property
    def best(self) -> float:
        """Seconds per iteration of the best plan of all."""
        return min(answer.seconds_per_iteration for answer in self.answers)

    def median_gap(self, method: str) -> float:
        """Median over seeds of the distance to the best plan of all."""
        found = [a.seconds_per_iteration for a in self.answers if a.method == method]
        return quantile(found, 50) / self.best - 1.0 if found else float("inf")


def solve_case(case: ScheduleCase, seeds: Sequence[int], budget: float, config: SearchConfig) -> Solved:
    """All methods on one problem, each with the same seconds.

    Args:
        case: Problem.
        seeds: Of methods that draw random numbers; others run once.
        budget: Seconds of each run, tables excluded.
        config: Of the gradient search.
    """
    torch.set_num_threads(1)
    tables = case.tables()
    settings = replace(config, max_seconds=budget)
    answers = [_search(case, tables, settings, seed) for seed in seeds]
    for name, planner in SCHEDULE_PLANNERS.items():
        for seed in seeds if planner.seeded else seeds[:1]:
            began = time.monotonic()
            found = planner.solve(tables, case.space, deadline=began + budget, seed=seed)
            answers.append(_answer(case, name, seed, tables, found, budget, time.monotonic() - began))
    answers += _fixed(case, tables)
    best = min(answer.seconds_per_iteration for answer in answers)
    bound = simulated_lower_bound(list(tables), case.space, known=best, seconds=budget)
    return Solved(case, tuple(answers), bound)


def _search(case: ScheduleCase, tables: Sequence[CostTable], config: SearchConfig, seed: int) -> Answer:
    began = time.monotonic()
    found = search_tables(tables, case.space, config, seed)
    spent = time.monotonic() - began
    if found is None:
        return Answer(case.name, SEARCH, seed, float("inf"), "", spent, 0)
    unless_interrupted(found)
    # its steps and batches of moves are not cut: what came after the last second does not count
    cost = read_curve(found.curve, config.max_seconds)
    return Answer(
        case.name, SEARCH, seed, cost, found.plan.schedule_name, spent, found.plans_evaluated, found.curve
    )


def _answer(
    case: ScheduleCase, name: str, seed: int, tables: Sequence[CostTable], found: TableResult, budget: float,
    spent: float,
) -> Answer:  # fmt: skip
    schedule = "" if found.best is None else tables[found.best.table].pipeline.schedule
    cost = read_curve(found.curve, budget)
    return Answer(case.name, name, seed, cost, schedule, spent, found.plans_evaluated, found.curve)


def _fixed(case: ScheduleCase, tables: Sequence[CostTable]) -> Iterator[Answer]:
    """The best plans with the stages of Megatron-LM's rule, and with those that NVIDIA publishes."""
    layers = case.problem.model.layers
    for name in (DEFAULT, PUBLISHED):
        incumbent = Incumbent(tables, None, keep_all=True)
        for number, table in enumerate(tables):
            chunks = chunks_of(case.layout) if name == PUBLISHED else default_chunks(layers, table.num_stages)
            if table.pipeline.schedule in OWN and chunks and len(chunks) == table.num_stages:
                starts = first_layers(chunks, layers)
                if starts is not None:
                    incumbent.offer(number, uniform_plans(table, starts))
        if name == DEFAULT or case.layout:
            spent = time.monotonic() - incumbent.began
            yield _answer(case, name, 0, tables, incumbent.result(), float("inf"), spent)


def answers_csv(solved: Sequence[Solved]) -> str:
    """One line a run."""
    header = (
        "problem",
        "method",
        "seed",
        "iteration_time_s",
        "schedule",
        "seconds",
        "plans",
        "best_s",
        "bound_s",
    )
    rows = [
        (a.problem, a.method, a.seed, a.seconds_per_iteration, a.schedule, f"{a.seconds:.3f}", a.evaluated,
         entry.best, entry.bound)
        for entry in solved
        for a in entry.answers
    ]  # fmt: skip
    return csv_text(header, rows)


def gaps_table(solved: Sequence[Solved]) -> str:
    """Median gaps to the best plan of all methods, as Markdown, with what they say."""
    methods, lines = METHODS, []
    for entry in solved:
        winner = min(entry.answers, key=lambda answer: answer.seconds_per_iteration)
        tried = {answer.method for answer in entry.answers}
        cells = [_percent(entry.median_gap(method)) if method in tried else "-" for method in methods]
        ends = (winner.schedule, f"{entry.best:.4g} s", f"{entry.bound:.4g} s")
        lines.append((entry.case.name, *cells, *ends, _percent(entry.best / entry.bound - 1.0)))
    header = ("problem", *methods, "best schedule", "best plan", "proven bound", "within")
    return "\n".join([*markdown_table(header, lines), "", *_verdict(solved, methods)]) + "\n"


def _verdict(solved: Sequence[Solved], methods: Sequence[str]) -> list[str]:
    """Where the gradient search is best or equal, where another method is better, and where it ties."""
    gaps = {entry.case.name: {m: entry.median_gap(m) for m in methods} for entry in solved}
    worse = {
        name: [m for m in methods if m != SEARCH and row[m] < row[SEARCH] - EQUAL]
        for name, row in gaps.items()
    }
    ties = [
        name
        for name, row in gaps.items()
        if not worse[name] and any(row[m] <= row[SEARCH] + EQUAL for m in methods if m != SEARCH)
    ]
    good = sum(not better for better in worse.values())
    lines = [f"The gradient search's median plan is the best or equal on {good} of {len(gaps)} problems."]
    lines += [f"- {name}: better are {', '.join(better)}." for name, better in worse.items() if better]
    if ties:
        lines.append(f"A rival ties on: {', '.join(ties)}.")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if np.isfinite(share) else "no plan"
