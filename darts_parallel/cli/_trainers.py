"""Ask every trainer about a job: whether it takes the plan, and else for its own best one."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from darts_parallel.config import EXPORTS
from darts_parallel.cost import CostTable, without_dominated
from darts_parallel.errors import DartsParallelError
from darts_parallel.exact import find_uniform_plan
from darts_parallel.export import model_refusals, refusals, taken_by
from darts_parallel.planner import Planned, out_of_memory, posterior
from darts_parallel.plans import Plan, job_facts, trainer_runs
from darts_parallel.problem import Problem
from darts_parallel.report import fits_label, one_line, table_of
from darts_parallel.report import seconds as seconds_label

SECONDS = 15.0
"""Wall-clock seconds at most for the best plans of all trainers; 1.5 are usual."""
COUNT = 4
"""Plans of a trainer of which the first one that it takes is its best."""


@dataclass(frozen=True)
class Offer:
    """A trainer's plan for a job: the chosen plan if it runs that, else its best uniform plan."""

    name: str
    plan: Plan | None
    """None: no plan of this space."""
    seconds: float | None = None
    """Per iteration."""
    slower: float = 0.0
    """Relative to the chosen plan."""
    chance: float | None = None
    """Probability that the job runs out of memory."""
    takes: bool = False
    """Whether it takes the chosen plan."""
    why: str = ""
    """Why it takes no plan, one clause."""

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
    return f"no trainer takes {file}"


def trainers_table(found: Sequence[Offer], problem: Problem) -> Table:
    """Return a line for every trainer: what each makes of the job."""
    columns = [("trainer", "left"), ("plan (trainer=NAME searches more)", "left")]
    table = table_of(None, *columns, ("seconds", "right"), ("fits", "right"))
    for offer in found:
        if offer.plan is None:
            table.add_row(offer.name, one_line(f"none: {offer.why}"), "", "")
            continue
        words = (
            "this plan" if offer.takes else offer.plan.describe(problem.training.global_batch_size)
        )
        time = "" if offer.seconds is None else seconds_label(offer.seconds)
        table.add_row(offer.name, one_line(words), time, fits_label(offer.chance))
    return table


def trainer_sentences(found: Sequence[Offer], problem: Problem, given: Sequence[str]) -> list[str]:
    """Say how a trainer gets its plan, and what none that takes this one costs."""
    others = [offer for offer in found if offer.plan is not None and not offer.takes]
    if not others:
        return []
    lines = []
    if not any(offer.takes for offer in found):
        lines += _within_error(min(others, key=lambda offer: offer.slower), problem)
    named = problem.config.space.trainer
    kept = [override for override in given if not override.startswith("trainer=")]
    again = " ".join(["darts-parallel", *kept, "trainer=NAME"])
    whose = f"rows consider plans of {named} only; " if named else ""
    return [*lines, f"{whose}best plan for another trainer: {again}"]


def _within_error(best: Offer, problem: Problem) -> list[str]:
    """Say so where a trainer's own plan is slower by less than the model can tell."""
    difference = exp(posterior(problem).difference) - 1.0
    if best.slower >= difference:
        return []
    told = f"less than the model can tell ({100 * difference:.0f} %)"
    faster = f"{100 * best.slower:.1f} %"
    return [
        f"No trainer takes this plan, and it is faster than {best.name}'s own by {faster}, {told}."
    ]


def offers(problem: Problem, planned: Planned, seconds: float) -> Iterator[Offer]:
    """Yield what each trainer makes of the job; beside a given plan no other is looked for.

    Args:
        problem: As it was searched.
    """
    config, plan, deadline = problem.config, planned.plan, time.monotonic() + SECONDS
    closed = config.cost.name == "analytic" and config.cost.pipeline == "closed_form"
    others = closed and planned.result is not None and config.space.offload is None
    for name in EXPORTS:
        refused = refusals(problem, plan, name)
        if not refused:
            yield Offer(name, plan, seconds, 0.0, out_of_memory(plan, problem), takes=True)
        elif lacking := model_refusals(problem, name):
            yield Offer(name, None, why=lacking[0][0])
        elif not others:
            yield Offer(name, None, why=refused[0][0])
        else:
            yield _own_row(name, problem, planned.tables, deadline, seconds)


def _own_row(
    name: str,
    problem: Problem,
    tables: Sequence[CostTable],
    deadline: float,
    chosen: float,
) -> Offer:
    """Return a trainer's own best plan; what its rules refuse of the user's pins is the reason."""
    try:
        return _own_best(name, problem, tables, deadline, chosen)
    except DartsParallelError as error:
        return Offer(name, None, why=str(error).rstrip("."))


def _own_best(
    name: str, problem: Problem, tables: Sequence[CostTable], deadline: float, chosen: float
) -> Offer:
    """Return the best uniform plan of a trainer, by the tables of the chosen plan."""
    space = replace(problem.config.space, trainer=name)
    own = replace(
        Problem.from_config(replace(problem.config, space=space)), headroom=problem.headroom
    )
    fused = torch.tensor([layer.fused_to_previous for layer in own.model.layers])
    mine, rules = [], own.config.abilities(name)
    job = job_facts(own.model, own.training, own.software)
    for table in tables:
        schedule = table.pipeline.schedule
        kept = [
            i
            for i, choice in enumerate(table.choices)
            if trainer_runs(rules, job, table.pp, table.cp, schedule, choice)
        ]
        if kept:
            mine.append(
                without_dominated(replace(table.keep_choices(kept), fused_to_previous=fused))
            )
    found = find_uniform_plan(mine, deadline=deadline, count=COUNT)
    for candidate in found.alternatives:
        plan = candidate.to_plan(mine)
        if not refusals(own, plan, name):
            return Offer(
                name, plan, candidate.time, candidate.time / chosen - 1.0, out_of_memory(plan, own)
            )
    why = "no plan of this space that it runs " + ("fits" if found.proven else "was found")
    return Offer(name, None, why=why)
