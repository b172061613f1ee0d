"""The protocol of a bilevel run: search, then retrain the found plan and its rivals from scratch.

A folder holds one JSON file for each finished seed, `bilevel.csv` (every training), `report.md` (medians,
spread, paired differences with their p), checkpoints and TensorBoard curves. Finished seeds and trainings are
not run again, and a search that was killed resumes where its last checkpoint stands.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from darts_parallel.bilevel.data import Corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.loop import BilevelRecord, BilevelSearch, fingerprint, resume
from darts_parallel.bilevel.report import write_report
from darts_parallel.bilevel.retraining.retrain import FIRST_RETRAIN_SEED, Retrained
from darts_parallel.bilevel.retraining.trainings import Training, Trainings
from darts_parallel.bilevel.retraining.uniform_bits import UniformChoice, choose_uniform
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.tracking import BilevelTracker
from darts_parallel.bilevel.upper.found import (
    BilevelFound,
    BilevelPlan,
    conclude,
    plan_problem,
    search_result,
    verify,
)
from darts_parallel.bilevel.upper.rivals import arm_plans
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.exact.verification import Verification
from darts_parallel.gradient.result import SearchResult
from darts_parallel.gradient.step_record import StepRecord
from darts_parallel.plan.file import write_json
from darts_parallel.problem.problem import Problem
from darts_parallel.report.plan_json import plan_dict

REFERENCE = "all_16_bit"
"""Its smoothed test loss after `retrain_steps` is the target of a retraining seed."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is done now, steps done and steps in all."""


@dataclass(frozen=True)
class SeedPlan:
    """What one seed's search found, before anything is retrained."""

    search: BilevelSearch
    found: BilevelFound
    result: SearchResult
    verifications: list[Verification]

    def plan_dict(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        chosen = self.found.chosen
        here = plan_problem(self.search.problem, chosen)
        return plan_dict(here, chosen.plan, evaluate(chosen.plan, here), self.result, self.verifications)


@dataclass(frozen=True)
class Protocol:
    """Runs the seeds of one problem.

    Attributes:
        problem: With `config.bilevel`.
        corpus: Bytes.
        folder: For all files.
        jobs: Runs trainings side by side.
        tensorboard: Whether curves are written.
        on_progress: See `OnProgress`.
        on_plan: Called with a seed and its plan as soon as there is one; not for seeds that were finished.
        on_record: Called with the records of the first seed's search, for the main search's curves.
    """

    problem: Problem
    corpus: Corpus
    folder: Path
    jobs: Jobs
    tensorboard: bool = True
    on_progress: OnProgress = lambda text, done, total: None
    on_plan: Callable[[int, SeedPlan], None] = lambda seed, plan: None
    on_record: Callable[[int, StepRecord], None] = lambda seed, record: None
    uniform: dict[str, UniformChoice | None] = field(default_factory=dict)
    """Under `choice` the best uniform bits, once they are known."""

    @property
    def trainings(self) -> Trainings:
        """Keeps the curves of everything that is trained from scratch."""
        return Trainings(self.folder / "retrained", self.corpus, self.jobs)

    def run(self, on_seed: Callable[[int, dict[str, Any]], None] = lambda seed, data: None) -> str:
        """All seeds; returns the text of `report.md`.

        Args:
            on_seed: Called with a seed and what its file holds when it is done.

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
            free = {"seeds", "processes"}
            different = [k for k in mark if k not in free and data["settings"].get(k) != mark[k]]
            if different:
                raise ConfigError(
                    f"{path} was run with another {different[0]}; nearest legal: another folder, "
                    "e.g. by hydra.run.dir or folder."
                )
            on_seed(seed, data)
            text = write_report(self.folder)
        return text

    def _mark(self, settings: BilevelSettings) -> dict[str, Any]:
        """What a seed's figures depend on."""
        return asdict(settings) | {"problem": fingerprint(self.problem)}

    def run_seed(self, settings: BilevelSettings) -> dict[str, Any]:
        """Search, verify, then retrain every arm from scratch on other seeds."""
        name = f"seed-{settings.seed}"
        tracker = BilevelTracker(self.folder / "tensorboard" / name, settings) if self.tensorboard else None
        try:
            plan = self._search(settings, tracker)
            self.on_plan(settings.seed, plan)
            runs = self._retrain_arms(plan, tracker)
            data = {
                "seed": settings.seed,
                "settings": self._mark(settings),
                "plan": plan.plan_dict(),
                "search": _search_dict(plan),
                "runs": runs,
            }
            if tracker is not None:
                tracker.finish(data)
        finally:
            if tracker is not None:
                tracker.close()
        return data

    def _search(self, settings: BilevelSettings, tracker: BilevelTracker | None) -> SeedPlan:
        search = BilevelSearch(settings, self.problem, self.corpus, self.jobs)
        history: list[StepRecord] = []

        def on_record(record: BilevelRecord) -> None:
            self.on_progress(f"seed {settings.seed}: search", record.step, settings.num_steps)
            if record.upper is not None:
                history.append(record.upper.record)
                self.on_record(settings.seed, record.upper.record)
            if tracker is not None:
                tracker.record(record)

        checkpoints = self.folder / "checkpoints" / f"seed-{settings.seed}"
        resume(search, checkpoints, lambda text: print(text, file=sys.stderr))
        if settings.estimator == "trials" and search.trials is None:
            self.on_progress(f"seed {settings.seed}: trials of few bits", 0, settings.num_steps)
        search.run(on_record, checkpoints)
        found = conclude(search)
        budget = self.problem.config.verification.max_seconds
        enabled = self.problem.config.verification.enabled
        checks = verify(search.space, found.chosen, budget) if enabled else []
        return SeedPlan(search, found, search_result(search, found, history), checks)

    def _plans(self, arm: str, plan: SeedPlan) -> list[tuple[BilevelPlan, int]]:
        """The plans of an arm, each with the weight steps that finding it cost."""
        search = plan.search
        if arm != "best_uniform":
            trials = search.trials.steps if search.trials else 0
            spent = {"trials_only": trials, "time_only": 0, "all_16_bit": 0, "all_4_bit": 0}
            return [(own, spent.get(arm, search.steps_spent)) for own in arm_plans(arm, search, plan.found)]
        if "choice" not in self.uniform:  # depends on no search
            seed = search.settings.seed
            self.uniform["choice"] = choose_uniform(
                search.space, search.settings, self.trainings,
                lambda done, total: self.on_progress(f"seed {seed}: uniform bits", done, total),
            )  # fmt: skip
        choice = self.uniform["choice"]
        return [] if choice is None else [(choice.plan, choice.steps)]

    def _retrain_arms(self, plan: SeedPlan, tracker: BilevelTracker | None) -> list[dict[str, Any]]:
        """One row for every arm, plan and retraining seed."""
        settings = plan.search.settings
        arms = [(arm, *own) for arm in settings.arms for own in self._plans(arm, plan)]
        first = FIRST_RETRAIN_SEED + settings.seed * settings.retrain_seeds
        seeds = [first + index for index in range(settings.retrain_seeds)]
        targets = {
            seed: run.final_loss
            for seed, run in zip(seeds, self.trainings.references(seeds, settings), strict=True)
        }
        wanted = [
            Training(own.blocks, own.global_batch_size, s, targets[s], way=own.way)
            for _, own, _ in arms
            for s in seeds
        ]
        curves = iter(
            self.trainings.run(
                wanted, settings,
                lambda done, total: self.on_progress(f"seed {settings.seed}: retraining", done, total),
            )
        )  # fmt: skip
        rows = []
        for arm, own, spent in arms:
            for seed in seeds:
                curve, target = next(curves), targets[seed]
                rows.append(_row(arm, own, seed, curve, target, settings) | {"search_steps": spent})
                if tracker is not None:
                    tracker.retrained(arm, seed, curve)
        return rows


def _row(
    arm: str, plan: BilevelPlan, seed: int, curve: Retrained, target: float, settings: BilevelSettings
) -> dict[str, Any]:
    """One training's figures; where the target was not reached, steps are those that were tried."""
    steps = curve.steps_to(target)
    tried = steps if steps is not None else float(curve.test[-1][0])
    return {
        "arm": arm,
        "seed": settings.seed,
        "retrain_seed": seed,
        "plan": plan.plan.describe(plan.global_batch_size),
        "blocks": [candidate.label() for candidate in plan.blocks],
        "global_batch_size": plan.global_batch_size,
        "seconds_per_step": plan.seconds,
        "test_loss": curve.final_loss,
        "target": target,
        "reached": steps is not None,
        "steps_to_target": tried,
        "time_to_target_s": tried * plan.seconds,
        "test": curve.test,
    }


def _search_dict(plan: SeedPlan) -> dict[str, Any]:
    """What the search learned and cost."""
    search, found = plan.search, plan.found
    known = found.log_steps
    trials = search.trials
    return {
        "seconds": found.seconds,
        "weight_steps": search.steps_spent,
        "forward_passes": search.passes,
        "logits_own_plan": found.own and found.own.plan.describe(found.own.global_batch_size),
        "logits_own_gap": found.own_gap,
        "learned_optimum_proven": found.optimum.proven,
        "exact_problems": found.optimum.solved,
        "noise_sequences": search.trainer.noise.sequences,
        "trials": None if trials is None else {
            "sums": {f"tp{tp} b{bits}": nats for (tp, bits), nats in trials.forward.items()},
            "gradients": {f"dp{dp} g{bits}": nats for (dp, bits), nats in trials.gradient.items()},
            "schedules_log_steps": dict(trials.way_log_steps),
            "sums_log_steps": {f"tp{tp} b{b}": cost for (tp, b), cost in trials.forward_log_steps.items()},
            "gradients_log_steps": {
                f"dp{dp} g{b}": cost for (dp, b), cost in trials.gradient_log_steps.items()
            },
        },
        "log_steps": {
            "sums": {f"tp{tp} b{bits}": known.forward[:, i].tolist()
                     for i, (tp, bits) in enumerate(known.forward_pairs)},
            "gradients": {f"dp{dp} g{bits}": known.gradient[:, i].tolist()
                          for i, (dp, bits) in enumerate(known.gradient_pairs)},
        },
    }  # fmt: skip
