"""The command's bilevel job: every seed's search, the retraining of its plan, and what is left of them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import at_batch
from darts_parallel.bilevel.protocol import Protocol, SeedPlan, SeedWatcher
from darts_parallel.bilevel.report import median_time, read_seeds, write_report
from darts_parallel.bilevel.settings import unused_settings
from darts_parallel.cost import evaluate
from darts_parallel.gradient import StepRecord
from darts_parallel.plan import Plan, write_json
from darts_parallel.problem import Problem
from darts_parallel.report import Tracker, render

QUARTERS = 4
"""Lines that a phase prints where there is no terminal to draw a bar on."""


@dataclass
class BilevelJob(SeedWatcher):
    """One command's bilevel run.

    Attributes:
        problem: With `config.bilevel`.
        folder: For all files.
        console: For the report.
        tracker: For the curves of the first seed and the pictures of its plan; None writes none.
        update: Shows steps done and a text where there is a terminal.
    """

    problem: Problem
    folder: Path
    console: Console
    tracker: Tracker | None
    update: Callable[[int, str], None]
    plan: SeedPlan | None = None
    quarters: dict[str, int] = field(default_factory=dict)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.problem.config.bilevel is not None
        self.first = self.problem.config.bilevel.seeds[0]

    def run(self) -> float:
        """Run all seeds; `plan.json` is the first seed's plan, written as soon as there is one.

        Returns:
            Median predicted seconds to the target loss of the plans found; where an interrupted run has
            retrained none, predicted seconds per step of the first plan.
        """
        settings = self.problem.config.bilevel
        assert settings is not None
        interrupted = False
        for sentence in unused_settings(self.problem):
            self._print(sentence)
        try:
            with Jobs(settings.processes) as jobs:
                curves = self.problem.config.output.tensorboard
                Protocol(self.problem, load_corpus(), self.folder, jobs, curves, self).run()
        except KeyboardInterrupt:
            interrupted = True
            if self.plan is None and not read_seeds(self.folder):
                raise
            done = [f"seed {data['seed']}" for data in read_seeds(self.folder)]
            finished = f"finished: {', '.join(done)}" if done else "no seed is finished"
            print(
                f"darts-parallel: interrupted; {finished}; plan.json is the best plan so far, and the same "
                f"command with hydra.run.dir={self.folder} runs what is left.",
                file=sys.stderr,
            )
        return self._finish(interrupted)

    def on_seed(self, seed: int, data: dict[str, Any]) -> None:
        """Write the plan of the first seed, which an earlier run may have found."""
        if seed == self.first:
            write_json(self.folder / "plan.json", data["plan"])

    def on_plan(self, seed: int, plan: SeedPlan) -> None:
        """Print a plan, and write that of the first seed."""
        chosen = plan.found.chosen
        words = ", ".join(candidate.label() for candidate in chosen.blocks)
        self._print(f"seed {seed}: {chosen.plan.describe(chosen.global_batch_size)} ({words})")
        if seed == self.first:
            self.plan = plan
            write_json(self.folder / "plan.json", plan.plan_dict())

    def on_record(self, seed: int, record: StepRecord) -> None:
        """Write the curves of the first seed's logit steps."""
        record_every = self.problem.config.search.record_every
        if self.tracker is not None and seed == self.first and record.step % record_every == 0:
            self.tracker.record(record)

    def on_progress(self, text: str, done: int, total: int) -> None:
        """Move the bar, or print a line at every quarter."""
        self.update(done, f"{text}, {done} of {total}")
        if self.console.is_terminal or not self.problem.config.output.progress:
            return
        quarter = QUARTERS * done // max(total, 1)
        if self.quarters.get(text) != quarter:
            self.quarters[text] = quarter
            self._print(f"{text}, {done} of {total}")

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _finish(self, interrupted: bool) -> float:
        """Report the first seed's plan and the seeds that are done."""
        data = read_seeds(self.folder)
        seconds = median_time(data, "bilevel")
        if self.plan is not None:
            chosen, result, checks = self.plan.found.chosen, self.plan.result, self.plan.verifications
            plan, here = chosen.plan, chosen.problem(self.problem)
        else:
            first, result, checks = data[0]["plan"], None, []
            plan, here = Plan.from_dict(first), at_batch(self.problem, first["training"]["global_batch_size"])
        cost = evaluate(plan, here)
        render(here, result, plan, cost, checks, self.console)
        if self.tracker is not None and result is not None and not interrupted:
            self.tracker.finish(result, plan, cost)
        if data:
            self._print(write_report(self.folder))
        for name, path in (("plan", "plan.json"), ("trainings", "bilevel.csv"), ("report", "report.md")):
            if (self.folder / path).exists():
                self._print(f"{name}: {self.folder / path}")
        return seconds if seconds == seconds else cost.iteration_time_s
