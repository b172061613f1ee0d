"""Collect the exports of the root. They take seconds to import, so the root imports them late."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from darts_parallel.config import EXPORTS, require_member
from darts_parallel.cost import CostBreakdown as CostBreakdown
from darts_parallel.cost import PlanView as PlanView
from darts_parallel.cost import evaluate as evaluate
from darts_parallel.errors import ConfigError, Entries, UnsupportedError
from darts_parallel.export import Exported, export_plan, require_trainers
from darts_parallel.gradient import SearchResult as SearchResult
from darts_parallel.gradient import search as search
from darts_parallel.graph import ModuleGraph as ModuleGraph
from darts_parallel.planner import Planned as Planned
from darts_parallel.planner import choose_nodes, sensitivity
from darts_parallel.planner import plan as _plan
from darts_parallel.plans import LayerStrategy as LayerStrategy
from darts_parallel.plans import Plan as Plan
from darts_parallel.plans import write_json, write_text
from darts_parallel.problem import Problem as Problem
from darts_parallel.problem import load_problem as load_problem
from darts_parallel.report import Outcome, headline, plan_dict, report_page, report_tables


@dataclass(frozen=True, repr=False)
class PlannedJob(Planned):
    """A plan of a job, with what is known of it."""

    job: Problem = field(kw_only=True)
    """The problem as it was asked."""

    @staticmethod
    def of(planned: Planned, job: Problem) -> "PlannedJob":
        """Add the job to what the planner says of it."""
        return PlannedJob(**vars(planned), job=planned.problem or job)

    @cached_property
    def outcome(self) -> Outcome:
        """Price the plan, with the elasticities of its seconds."""
        cost = evaluate(self.plan, self.job)
        slopes = sensitivity(self.plan, self.job)
        known = (self.result, self.answers, slopes, self.warning)
        return Outcome(self.job, self.plan, cost, *known)

    def __str__(self) -> str:
        """Return the first lines of the report."""
        return "\n".join(line.plain for line in headline(self.outcome))

    __repr__ = __str__

    def to_dict(self) -> Entries:
        """Return the content of `plan.json`."""
        return plan_dict(self.outcome) | self.entries()

    def _repr_html_(self) -> str:
        """Return the page of the report, which notebooks show."""
        tables = report_tables(self.outcome)
        return report_page(self.outcome, tables, ())

    def save(self, folder: str | Path) -> Path:
        """Write `plan.json` and `report.html` into a folder; return the path of the first.

        Errors:
            DartsParallelError: the folder cannot be made or written.
        """
        file = Path(os.path.expanduser(folder)) / "plan.json"
        with suppress(OSError):  # `write_json` says why there is no folder
            file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, self.to_dict())
        write_text(file.with_name("report.html"), self._repr_html_())
        return file

    def export(self, trainer: str) -> Exported:
        """Return the files of a trainer, their texts by name, and notes.

        Errors:
            ConfigError: no trainer has this name.
            UnsupportedError: the trainer cannot run the plan; names what, and the closest space.
        """
        require_member("trainer", trainer, EXPORTS)
        return export_plan(self.outcome.problem, self.plan, trainer)


def plan(problem: Problem) -> PlannedJob:
    """Find a plan and check it, as the command does; errors as of `planner.plan` and `require_trainers`."""
    if not isinstance(problem, Problem):
        raise ConfigError(
            f"plan({problem!r}) must get a problem; try plan(load_problem(['model=llama3_8b']))."
        )
    if lengths := problem.training.lengths:
        raise UnsupportedError(
            f"training.lengths={lengths} is planned by the command alone; try training.lengths=null."
        )
    problem, rental = choose_nodes(problem)
    require_trainers(problem)
    return PlannedJob.of(_plan(problem, rental=rental), problem)
