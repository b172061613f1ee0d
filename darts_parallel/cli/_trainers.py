"""Ask every trainer about a job: whether it takes the plan, and else for its own best one."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from rich.table import Table

from darts_parallel.config import NEWEST
from darts_parallel.cost import PricedPlan, build_tables, evaluate
from darts_parallel.errors import DartsParallelError, Entries
from darts_parallel.exact import find_uniform_within
from darts_parallel.export import model_refusals, refusals, taken_by
from darts_parallel.planner import (
    Asked,
    Planned,
    looser_levels,
    out_of_memory,
    some_blocks_plan,
    tightened,
)
from darts_parallel.plans import Plan
from darts_parallel.problem import Problem
from darts_parallel.report import fits_label, one_line, shown_path, table_of
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

    def to_dict(self) -> Entries:
        """Return the entry in `plan.json`."""
        return {"seconds": self.seconds, "chance": self.chance, "takes_this_plan": self.takes}


def start_command(problem: Problem, plan: Plan, file: Path) -> str:
    """Return the command that starts a plan: an export for a trainer that runs it.

    Where none takes it, say so: what no program can export does not run here, either.
    """
    shown = shown_path(file)
    software = problem.training.software
    fitted = [name for name in NEWEST if software in problem.config.abilities(name).software]
    taken = taken_by(problem, plan)
    for name in (problem.config.space.trainer, *fitted, "torch", *taken):
        if name in taken:
            return f"darts-parallel plan={shown} export={name}"
    return f"no trainer takes {shown}; plan for one: darts-parallel ... trainer=NAME"


def trainers_table(found: Sequence[Offer], problem: Problem, chosen: Plan) -> Table:
    """Return a line for every trainer: what each makes of the job."""
    average = problem.training.software is None and problem.config.cost.knows_stages
    whose = "by the trainer's own efficiencies" + " (above: average ones)" * average
    columns = ["trainer", f"best plan {whose}"]
    table = table_of(None, *columns, "seconds>", "fits>")
    for offer in found:
        if offer.plan is None or offer.seconds is None:
            table.add_row(offer.name, one_line(f"none: {offer.why}"), "", "")
            continue
        words = offer.plan.describe(problem.training.global_batch_size)
        words = "this plan" if offer.plan == chosen else words
        words = f"{offer.why}: {words}" if offer.why else words
        seconds = seconds_label(offer.seconds)
        table.add_row(offer.name, one_line(words), seconds, fits_label(offer.chance))
    return table


def offers(problem: Problem, planned: Planned) -> Iterator[Offer]:
    """Yield what each trainer makes of the job; next to a given plan no other is looked for.

    Args:
        problem: As it was searched.
    """
    config = problem.config
    plan = planned.plan
    search = config.cost.name == "analytic" and config.solved and planned.result is not None
    rows = _TrainerRows(plan, time.monotonic() + SECONDS)
    for name in NEWEST:
        refused = refusals(problem, plan, name)
        try:
            own = own_problem(problem, name)
            if lacking := model_refusals(own, name) or ([] if search else refused):
                yield Offer(name, None, why=lacking[0][0])
            else:
                yield rows.row(name, problem, own, takes=not refused, search=search)
        except DartsParallelError as error:
            why = str(error).removeprefix(f"space.trainer={name} ")
            reason = why.partition(" GPUs: ")[2] or why
            # its advice is about pins, and here another row helps
            yield Offer(name, None, why=reason.rstrip(".").partition("; try space.trainer")[0])


@dataclass(frozen=True)
class _TrainerRows:
    """Makes the rows of all trainers."""

    plan: Plan
    deadline: float
    """Limit of `time.monotonic()` for the searches of all trainers."""

    def row(self, name: str, problem: Problem, own: Problem, *, takes: bool, search: bool) -> Offer:
        """Return a trainer's own best plan, or the chosen one where that is as fast."""
        same = own.training == problem.training
        limit = own.config.space.out_of_memory
        known = inf
        taken = None
        if takes:
            seconds = evaluate(self.plan, own).iteration_time_s
            chance = out_of_memory(self.plan, own)
            taken = Offer(name, self.plan, seconds, chance, takes=True)
            if same or not search:
                return taken
            if (chance or 0.0) <= limit:
                known = seconds
        best = self._own_best(name, tightened(own), known)
        mixed = own.config.abilities(name).layerwise and problem.config.space.kind != "uniform"
        if mixed and best.plan is not None:
            best = replace(best, why=f"uniform; try trainer={name}")
        best = replace(best, takes=takes)
        # the chosen plan may be too risky by this trainer's own bytes
        found = [offer for offer in (taken, best) if offer and offer.plan]
        return min(
            found, default=best, key=lambda one: ((one.chance or 0.0) > limit, one.seconds or inf)
        )

    def _own_best(self, name: str, own: Problem, known: float) -> Offer:
        """Return the best uniform plan of a trainer that is not slower than `known` seconds."""
        late = Offer(name, None, why=f"not finished; try trainer={name}")
        if time.monotonic() > self.deadline:
            return late
        mine = build_tables(own)
        limit = own.config.space.out_of_memory

        def keeps(candidate: PricedPlan) -> bool:
            return (out_of_memory(candidate.to_plan(mine), own) or 0.0) <= limit

        asked = Asked.of(own, mine)
        levels = [*looser_levels(asked), asked]
        tables = [level.tables for level in levels]
        for count in COUNTS:
            found = find_uniform_within(tables, keeps, known, self.deadline, count, even=False)
            ranked = list(found.alternatives)
            least = (ranked[0].time if ranked else known) * (1.0 - own.config.search.tie)
            # the first level has the most memory: what finds nothing there finds nothing later
            for level in levels:
                better = some_blocks_plan(level, least)
                if better is None:
                    break
                if keeps(better):
                    ranked.insert(0, better)
                    break
            for candidate in ranked:
                plan = candidate.to_plan(mine)
                if refusals(own, plan, name):
                    continue
                why = "" if found.proven else f"unfinished; try trainer={name}"
                return Offer(name, plan, candidate.time, out_of_memory(plan, own), why=why)
            if not found.proven:
                return late
            if not ranked:
                break
        return Offer(name, None, why="no plan of this space that it runs fits")


def own_problem(problem: Problem, name: str) -> Problem:
    """Return the problem of a trainer: uniform plans that it runs, by its own efficiencies."""
    config = problem.config.for_trainer(name, executable=False, kind="uniform")
    return Problem.from_config(config, problem.model).leaving_free(problem.headroom)
