"""The protocol of a bilevel run: search, then retrain the found plan and its baselines from scratch.

A folder holds one JSON file for each finished seed, `bilevel.csv` (every training), `report.md` (medians and
spread) and TensorBoard curves. Finished seeds and trainings are not run again. `BilevelJob` is the command's.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from darts_parallel.bilevel.conclusion import (
    BilevelPlan,
    Conclusion,
    conclude,
    search_result,
    uniform_plan,
    verify,
)
from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.joint_space import at_batch
from darts_parallel.bilevel.loop import BilevelRecord, BilevelSearch
from darts_parallel.bilevel.report import BilevelTracker, median_time, read_seeds, write_report
from darts_parallel.bilevel.retrain import (
    FIRST_RETRAIN_SEED,
    Retrained,
    Training,
    Trainings,
    digest,
)
from darts_parallel.bilevel.settings import BilevelSettings, unused_settings
from darts_parallel.cost import LOSSLESS, evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.exact import Verification
from darts_parallel.gradient import SearchResult, StepRecord
from darts_parallel.plans import Plan, write_json
from darts_parallel.problem import Problem
from darts_parallel.report import Outcome, Tracker, plan_dict, render


@dataclass(frozen=True)
class SeedPlan:
    """Result of one seed's search, before anything is retrained."""

    search: BilevelSearch
    found: Conclusion
    result: SearchResult
    verifications: list[Verification]

    def plan_dict(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        chosen = self.found.chosen
        here = chosen.problem(self.search.problem)
        cost = evaluate(chosen.plan, here)
        return plan_dict(Outcome(here, chosen.plan, cost, self.result, self.verifications))


Maker = Callable[[SeedPlan], Sequence[tuple[BilevelPlan | None, int]]]
"""Returns plans to retrain and the weight steps that finding each cost; None where one fits no memory."""


def _chosen(seed: SeedPlan) -> list[tuple[BilevelPlan | None, int]]:
    return [(seed.found.chosen, seed.search.steps_spent)]


def _raw(seed: SeedPlan) -> list[tuple[BilevelPlan | None, int]]:
    return [(seed.found.raw, seed.search.steps_spent)]


def _lossless(seed: SeedPlan) -> list[tuple[BilevelPlan | None, int]]:
    return [(uniform_plan(seed.search, LOSSLESS, LOSSLESS), 0)]


MAKERS: dict[str, Maker] = {"bilevel": _chosen, "raw": _raw, "all_16_bit": _lossless}
"""How the variants of `config.bilevel.VARIANTS` are made."""


FREE = ("seeds", "processes")
"""Settings that a seed's figures do not depend on."""


class SeedWatcher:
    """Receives what a run does; each method may be overridden."""

    def on_progress(
        self,
        text: str,
        done: int,
        total: int,
    ) -> None:
        """Take in what is done now, steps done and steps in all."""

    def on_record(self, seed: int, record: StepRecord) -> None:
        """Take in a logit step."""

    def on_plan(self, seed: int, plan: SeedPlan) -> None:
        """Take in a seed's plan as soon as there is one; not for seeds that were finished."""

    def on_seed(self, seed: int, data: dict[str, Any]) -> None:
        """Take in what the file of a finished seed holds."""


@dataclass(frozen=True)
class Protocol:
    """Runs the seeds of one problem.

    Attributes:
        problem: With `config.bilevel`.
        corpus: Bytes.
        folder: For all files.
        jobs: Runs trainings side by side.
        tensorboard: Whether curves are written.
        watcher: Receives what is done.
        baselines: Plans that are retrained next to `config.bilevel.variants`, by name.
    """

    problem: Problem
    corpus: Corpus
    folder: Path
    jobs: Jobs
    tensorboard: bool = True
    watcher: SeedWatcher = field(default_factory=SeedWatcher)
    baselines: Mapping[str, Maker] = field(default_factory=dict)

    @property
    def trainings(self) -> Trainings:
        """Stores the curves of everything that is trained from scratch."""
        return Trainings(self.folder / "retrained", self.corpus, self.jobs)

    def run(self) -> str:
        """Run all seeds; return the text of `report.md`.

        Errors:
            ConfigError: the folder holds a seed of other settings.
        """
        assert self.problem.config.bilevel is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        text = ""
        for seed in self.problem.config.bilevel.seeds:
            path = self.folder / f"seed-{seed}.json"
            settings = BilevelSettings.of(self.problem, seed)
            mark = json.loads(json.dumps(self._mark(settings)))
            if not path.exists():
                write_json(path, self.run_seed(settings))
            data = json.loads(path.read_text(encoding="utf-8"))
            stored = data["settings"]
            different = [key for key in mark if stored.get(key) != mark[key]]
            different = [key for key in different if key not in FREE]
            if different:
                raise ConfigError(
                    f"{path} was run with another {different[0]}; try another folder, e.g. by hydra.run.dir "
                    "or folder."
                )
            self.watcher.on_seed(seed, data)
            text = write_report(self.folder)
        return text

    def _mark(self, settings: BilevelSettings) -> dict[str, Any]:
        """Return everything that a seed's figures depend on."""
        parts = asdict(self.problem.config)
        named = ("model", "cluster", "training", "space", "cost", "search")
        groups = {key: parts[key] for key in named}
        return asdict(settings) | {"problem": digest(groups), "baselines": list(self.baselines)}

    def run_seed(self, settings: BilevelSettings) -> dict[str, Any]:
        """Search, verify, then retrain every variant from scratch on other seeds.

        Errors:
            KeyboardInterrupt: Ctrl-C, once the watcher has the plan that was found before it.
        """
        name = f"seed-{settings.seed}"
        tracker = None
        if self.tensorboard:
            names = [layer.name for layer in self.problem.model.layers]
            tracker = BilevelTracker(self.folder / "tensorboard" / name, settings, names)
        try:
            plan = self._search(settings, tracker)
            self.watcher.on_plan(settings.seed, plan)
            if plan.found.stopped_by is not None:
                raise KeyboardInterrupt
            rows = self._retrain(plan, tracker)
        finally:
            if tracker is not None:
                tracker.close()
        asked = {"seed": settings.seed, "settings": self._mark(settings)}
        return asked | {"plan": plan.plan_dict(), "search": _search_dict(plan), "runs": rows}

    def _search(self, settings: BilevelSettings, tracker: BilevelTracker | None) -> SeedPlan:
        """Search and verify; after Ctrl-C conclude from what is known."""
        seed = settings.seed
        search = BilevelSearch(settings, self.problem, self.corpus, self.jobs)
        history: list[StepRecord] = []
        found: Conclusion | None = None
        checks: list[Verification] = []

        def on_record(record: BilevelRecord) -> None:
            self.watcher.on_progress(f"seed {seed}: search", record.step, settings.num_steps)
            if record.upper is not None:
                history.append(record.upper.record)
                self.watcher.on_record(seed, record.upper.record)
            if tracker is not None:
                tracker.record(record)

        try:
            if settings.estimator == "trials":
                self.watcher.on_progress(f"seed {seed}: trials of few bits", 0, settings.num_steps)
            search.run(on_record)
            found = conclude(search)
            if self.problem.config.verification.enabled:
                budget = self.problem.config.verification.max_seconds
                checks = verify(search.space, found.chosen, budget)
        except KeyboardInterrupt:
            found = conclude(search, "user") if found is None else replace(found, stopped_by="user")
        return SeedPlan(search, found, search_result(search, found, history), checks)

    def _retrain(self, plan: SeedPlan, tracker: BilevelTracker | None) -> list[dict[str, Any]]:
        """Return one row for every variant, plan and retraining seed."""
        settings = plan.search.settings
        makers = {name: MAKERS[name] for name in settings.variants} | dict(self.baselines)
        first = FIRST_RETRAIN_SEED + settings.seed * settings.retrain_seeds
        seeds = [first + index for index in range(settings.retrain_seeds)]
        targets = [run.final_loss for run in self.trainings.references(seeds, settings)]
        rounds = []
        for name, make in makers.items():
            for own, spent in make(plan):
                if own is None:
                    continue
                for seed, target in zip(seeds, targets, strict=True):
                    training = Training(own.blocks, own.global_batch_size, seed, target)
                    rounds.append(_Round(name, own, spent, training))

        def on_done(done: int, total: int) -> None:
            self.watcher.on_progress(f"seed {settings.seed}: retraining", done, total)

        trainings = [one.training for one in rounds]
        curves = self.trainings.run(trainings, settings, on_done)
        rows = []
        for one, curve in zip(rounds, curves, strict=True):
            row = one.row(curve) | {"seed": settings.seed, "search_steps": one.steps_spent}
            rows.append(row)
            if tracker is not None:
                seconds = row["time_to_target_s"]
                tracker.retrained(one.name, one.training.seed, curve, seconds)
        return rows


@dataclass(frozen=True)
class _Round:
    """One training of one variant's plan."""

    name: str
    plan: BilevelPlan
    steps_spent: int
    """Weight steps that finding the plan took."""
    training: Training

    def row(self, curve: Retrained) -> dict[str, Any]:
        """Sum up the training; where the target was not reached, steps are those that were tried."""
        target = self.training.target
        assert target is not None
        steps = curve.steps_to(target)
        tried = steps if steps is not None else float(curve.test[-1][0])
        batch = self.plan.global_batch_size
        row: dict[str, Any] = {"variant": self.name, "retrain_seed": self.training.seed}
        row["plan"] = self.plan.plan.describe(batch)
        row["blocks"] = [candidate.label() for candidate in self.plan.blocks]
        row["global_batch_size"] = batch
        row["seconds_per_step"] = self.plan.seconds
        row["test_loss"] = curve.final_loss
        row["target"] = target
        row["reached"] = steps is not None
        row["steps_to_target"] = tried
        row["time_to_target_s"] = tried * self.plan.seconds
        row["test"] = curve.test
        return row


def _search_dict(plan: SeedPlan) -> dict[str, Any]:
    """Sum up what the search learned and cost."""
    found = plan.found
    prices = found.prices
    sums = {}
    for place, (tp, bits) in enumerate(prices.forward_pairs):
        sums[f"tp{tp} b{bits}"] = prices.forward[:, place].tolist()
    gradients = {}
    for place, (dp, bits) in enumerate(prices.gradient_pairs):
        gradients[f"dp{dp} g{bits}"] = prices.gradient[:, place].tolist()
    data: dict[str, Any] = {"seconds": found.seconds}
    data["weight_steps"] = plan.search.steps_spent
    data["raw_plan"] = None
    if found.raw is not None:
        data["raw_plan"] = found.raw.plan.describe(found.raw.global_batch_size)
    data["raw_gap"] = found.raw_gap
    data["learned_optimum_proven"] = found.proven
    data["noise_sequences"] = plan.search.trainer.noise.sequences
    data["log_slowdown"] = {"sums": sums, "gradients": gradients}
    return data


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
        if self.tracker is not None and seed == self.first:
            self.tracker.record(record)

    def on_progress(
        self,
        text: str,
        done: int,
        total: int,
    ) -> None:
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
        outcome = self._outcome(data)
        render(outcome, self.console)
        if self.tracker is not None and outcome.result is not None and not interrupted:
            self.tracker.finish(outcome)
        if data:
            self._print(write_report(self.folder))
        files = {"plan": "plan.json", "trainings": "bilevel.csv", "report": "report.md"}
        for name, path in files.items():
            if (self.folder / path).exists():
                self._print(f"{name}: {self.folder / path}")
        return seconds if seconds == seconds else outcome.cost.iteration_time_s

    def _outcome(self, data: list[dict[str, Any]]) -> Outcome:
        """Price the first seed's plan, which this run or an earlier one has found."""
        if self.plan is not None:
            found = self.plan
            here = found.found.chosen.problem(self.problem)
            plan = found.found.chosen.plan
            return Outcome(here, plan, evaluate(plan, here), found.result, found.verifications)
        first = data[0]["plan"]
        plan = Plan.from_dict(first)
        here = at_batch(self.problem, first["training"]["global_batch_size"])
        return Outcome(here, plan, evaluate(plan, here))
