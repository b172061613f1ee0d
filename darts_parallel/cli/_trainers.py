"""Ask every trainer about a job: whether it takes the plan, and else for its own best one."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from darts_parallel.config import EXPORTS
from darts_parallel.cost import CostTable, build_tables, evaluate, without_dominated
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact import find_uniform_plan
from darts_parallel.export import model_refusals, refusals, taken_by
from darts_parallel.planner import Planned, first_blocks_plan, out_of_memory, tightened
from darts_parallel.plans import Plan, job_facts, trainer_runs
from darts_parallel.problem import Problem
from darts_parallel.report import fits_label, one_line, table_of
from darts_parallel.report import seconds as seconds_label

SECONDS = 15.0
"""Wall-clock seconds at most for the best plans of all trainers; 1.5 are usual."""
COUNTS = (1, 4)
"""Plans of a trainer of which the first one that it takes is its best; where it takes none, of more."""


@dataclass(frozen=True)
class Offer:
    """A trainer's own best plan for a job, priced by the trainer's own efficiencies."""

    name: str
    plan: Plan | None
    """None: no plan of this space."""
    seconds: float | None = None
    """Per iteration."""
    chance: float | None = None
    """Probability that the job runs out of memory."""
    takes: bool = False
    """Whether it takes the chosen plan."""
    why: str = ""
    """Why there is no plan, or what the plan lacks to be the best one, one clause."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in `plan.json`."""
        return {"seconds": self.seconds, "chance": self.chance, "takes_this_plan": self.takes}


def start_command(problem: Problem, plan: Plan, file: Path) -> str:
    """Return the command that starts a plan: an export for a trainer that runs it.

    Where none takes it, say so: what no program can export does not run here, either.
    """
    named, software = problem.config.space.trainer, problem.training.software
    fitted = [name for name in EXPORTS if software in problem.config.abilities(name).software]
    taken = taken_by(problem, plan)
    for name in (named, *fitted, "torch", *taken):
        if name in taken:
            return f"darts-parallel plan={file} export={name}"
    return f"no trainer takes {file}; plan for one: darts-parallel ... trainer=NAME"


def trainers_table(found: Sequence[Offer], problem: Problem, chosen: Plan) -> Table:
    """Return a line for every trainer: what each makes of the job."""
    average = problem.training.software is None and problem.config.cost.knows_stages
    whose = "by the trainer's own efficiencies" + " (above: average ones)" * average
    columns = ["trainer", f"best plan {whose}"]
    table = table_of(None, *columns, "seconds>", "fits>")
    for offer in found:
        if offer.plan is None:
            table.add_row(offer.name, one_line(f"none: {offer.why}"), "", "")
            continue
        words = offer.plan.describe(problem.training.global_batch_size)
        words = "this plan" if offer.plan == chosen else words
        words = f"{offer.why}: {words}" if offer.why else words
        time = "" if offer.seconds is None else seconds_label(offer.seconds)
        table.add_row(offer.name, one_line(words), time, fits_label(offer.chance))
    return table


def offers(problem: Problem, planned: Planned, seconds: float) -> Iterator[Offer]:
    """Yield what each trainer makes of the job; next to a given plan no other is looked for.

    Args:
        problem: As it was searched.
        seconds: Of the chosen plan.
    """
    config, plan = problem.config, planned.plan
    closed = config.cost.name == "analytic" and config.cost.pipeline == "closed_form"
    search = closed and planned.result is not None and not config.unsolved
    rows = _TrainerRows(planned, seconds, time.monotonic() + SECONDS)
    for name in EXPORTS:
        refused = refusals(problem, plan, name)
        try:
            own = own_problem(problem, name)
            if lacking := model_refusals(own, name):
                yield Offer(name, None, why=lacking[0][0])
            elif refused and not search:
                yield Offer(name, None, why=refused[0][0])
            else:
                yield rows.row(name, problem, own, takes=not refused, search=search)
        except DartsParallelError as error:
            why = str(error).removeprefix(f"space.trainer={name} ")
            reason = why.partition(" GPUs: ")[2] or why
            yield Offer(name, None, why=reason.rstrip("."))


@dataclass(frozen=True)
class _TrainerRows:
    """Makes the rows of all trainers."""

    planned: Planned
    seconds: float
    """Seconds of the chosen plan."""
    deadline: float
    """Limit of `time.monotonic()` for the searches of all trainers."""

    def row(self, name: str, problem: Problem, own: Problem, *, takes: bool, search: bool) -> Offer:
        """Return a trainer's own best plan, or the chosen one where that is as fast."""
        plan = self.planned.plan
        same = own.training == problem.training
        taken = None
        if takes:
            seconds = self.seconds if same else evaluate(plan, own).iteration_time_s
            taken = Offer(name, plan, seconds, out_of_memory(plan, own), takes=True)
            if same or not search:
                return taken
        cuts = own.config.abilities(name).own_stages
        shared = same and problem.config.space.trainer is None and not cuts
        if not shared:
            own = tightened(own)
        best = self._own_best(name, own, shared=shared)
        layerwise = own.config.abilities(name).layerwise or own.config.space.executable
        if best.plan is not None and layerwise and problem.config.space.kind != "uniform":
            best = replace(best, why=f"uniform; try trainer={name}")
        best = replace(best, takes=takes)
        limit = own.config.space.out_of_memory
        # the chosen plan may be too risky by this trainer's own bytes
        found = (offer for offer in (taken, best) if offer is not None and offer.plan is not None)
        return min(
            found, default=best, key=lambda one: ((one.chance or 0.0) > limit, one.seconds or inf)
        )

    def _own_best(self, name: str, own: Problem, *, shared: bool) -> Offer:
        """Return the best uniform plan of a trainer."""
        again = f"trainer={name}"
        if time.monotonic() > self.deadline:
            return Offer(name, None, why=f"not finished; try {again}")
        if shared:
            mine = list(_restricted(self.planned.tables, own))
            own.tables.extend(mine)
        else:
            mine = [without_dominated(table) for table in build_tables(own)]
        for count in COUNTS:
            found = find_uniform_plan(mine, deadline=self.deadline, count=count)
            ranked = list(found.alternatives)
            if ranked:
                limit = ranked[0].time * (1.0 - own.config.search.tie)
                better = first_blocks_plan(mine, own, limit)
                ranked = [better, *ranked] if better else ranked
            for candidate in ranked:
                plan = candidate.to_plan(mine)
                if refusals(own, plan, name):
                    continue
                why = "" if found.proven else f"unfinished; try {again}"
                return Offer(name, plan, candidate.time, out_of_memory(plan, own), why=why)
            if not found.proven:
                return Offer(name, None, why=f"not finished; try {again}")
            if not ranked:
                break
        return Offer(name, None, why="no plan of this space that it runs fits")


def own_problem(problem: Problem, name: str) -> Problem:
    """Return the problem of a trainer: uniform plans that it runs, by its own efficiencies."""
    config = problem.config.for_trainer(name, executable=False, kind="uniform")
    return Problem.from_config(config).leaving_free(problem.headroom)


def _restricted(tables: Sequence[CostTable], own: Problem) -> Iterator[CostTable]:
    """Yield the part of each table that the trainer of a problem runs."""
    rules = own.config.abilities(str(own.config.space.trainer))
    fused = torch.tensor([layer.fused_to_previous for layer in own.model.layers])
    job = job_facts(own.model, own.training, own.software)
    for table in tables:
        schedule = table.pipeline.schedule
        kept = [
            i
            for i, choice in enumerate(table.choices)
            if trainer_runs(rules, job, table.pp, table.cp, schedule, choice)
        ]
        if kept:
            yield without_dominated(replace(table.keep_choices(kept), fused_to_previous=fused))
