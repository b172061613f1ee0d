"""The command's bilevel job: every seed's search, the retraining of its plan, and what is left of them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from darts_parallel.bilevel.checkpoint import checkpoints
from darts_parallel.bilevel.data import load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.protocol import Protocol, SeedPlan
from darts_parallel.bilevel.report import median_time, read_seeds, write_report
from darts_parallel.bilevel.upper.found import plan_problem
from darts_parallel.bilevel.upper.joint_space import at_batch
from darts_parallel.bilevel.upper.refused import unused_settings
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.file import write_json
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report import text as report
from darts_parallel.report.tensorboard import Tracker

QUARTERS = 4
"""Lines that a phase prints where there is no terminal to draw a bar on."""


@dataclass
class BilevelJob:
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
    said: dict[str, int] = field(default_factory=dict)
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
            self.console.print(sentence, highlight=False, soft_wrap=True, markup=False)
        try:
            with Jobs(settings.processes) as jobs:
                jobs.start()
                protocol = Protocol(
                    self.problem, load_corpus(), self.folder, jobs,
                    self.problem.config.output.tensorboard,
                    self._on_progress, self._on_plan, self._on_record,
                )  # fmt: skip
                protocol.run(self._on_seed)
        except KeyboardInterrupt:
            interrupted = True
            self._say_how_to_go_on()
        return self._finish(interrupted)

    def _on_seed(self, seed: int, data: dict[str, Any]) -> None:
        if seed == self.first:
            write_json(self.folder / "plan.json", data["plan"])

    def _on_plan(self, seed: int, plan: SeedPlan) -> None:
        chosen = plan.found.chosen
        words = ", ".join(candidate.label() for candidate in chosen.blocks)
        text = f"seed {seed}: {chosen.plan.describe(chosen.global_batch_size)} ({words})"
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
        if seed == self.first:
            self.plan = plan
            write_json(self.folder / "plan.json", plan.plan_dict())

    def _on_record(self, seed: int, record: StepRecord) -> None:
        record_every = self.problem.config.search.record_every
        if self.tracker is not None and seed == self.first and record.step % record_every == 0:
            self.tracker.record(record)

    def _on_progress(self, text: str, done: int, total: int) -> None:
        self.update(done, f"{text}, {done} of {total}")
        if self.console.is_terminal or not self.problem.config.output.progress:
            return
        quarter = QUARTERS * done // max(total, 1)
        if self.said.get(text) != quarter:
            self.said[text] = quarter
            self.console.print(f"{text}, {done} of {total}", highlight=False)

    def _say_how_to_go_on(self) -> None:
        """One sentence on what is kept; without anything to keep the command ends as any interrupted one."""
        done = [f"seed {data['seed']}" for data in read_seeds(self.folder)]
        begun = [path for path in sorted((self.folder / "checkpoints").glob("seed-*")) if checkpoints(path)]
        if not done and not begun and self.plan is None:
            raise KeyboardInterrupt
        kept = f"finished: {', '.join(done)}" if done else "no seed is finished"
        print(
            f"darts-parallel: interrupted; {kept}; the same command with hydra.run.dir={self.folder} goes on "
            "at the last checkpoint.",
            file=sys.stderr,
        )
        if self.plan is None and not (self.folder / "plan.json").exists():
            raise SystemExit(2)

    def _finish(self, interrupted: bool) -> float:
        """The report of the first seed's plan and of the seeds that are done."""
        data = read_seeds(self.folder)
        seconds = median_time(data, "bilevel") if data else float("nan")
        if self.plan is not None:
            chosen = self.plan.found.chosen
            here = plan_problem(self.problem, chosen)
            cost = evaluate(chosen.plan, here)
            report.render(here, self.plan.result, chosen.plan, cost, self.plan.verifications, self.console)
            if self.tracker is not None and not interrupted:
                self.tracker.finish(self.plan.result, chosen.plan, cost, self.plan.verifications)
            per_step = cost.iteration_time_s
        else:
            first = data[0]["plan"]
            plan, here = Plan.from_dict(first), at_batch(self.problem, first["training"]["global_batch_size"])
            cost = evaluate(plan, here)
            report.render(here, None, plan, cost, [], self.console)
            per_step = cost.iteration_time_s
        if data:
            self.console.print(write_report(self.folder), highlight=False, soft_wrap=True, markup=False)
        for name, path in (("plan", "plan.json"), ("trainings", "bilevel.csv"), ("report", "report.md")):
            if (self.folder / path).exists():
                line = f"{name}: {self.folder / path}"
                self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        return seconds if seconds == seconds else per_step
