"""The protocol of a bilevel run: search, then retrain the found plan and its rivals from scratch.

A folder holds one JSON file for each finished seed, `bilevel.csv` (every training), `report.md` (medians,
spread, paired differences with their p), checkpoints and TensorBoard curves. Finished seeds and trainings are
not run again, and a search that was killed resumes where its last checkpoint stands.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus
from darts_parallel.bilevel.jobs import Jobs
from darts_parallel.bilevel.loop import RETRAIN_ONLY, BilevelRecord, BilevelSearch, fingerprint, resume
from darts_parallel.bilevel.report import write_report
from darts_parallel.bilevel.retrain import FIRST_RETRAIN_SEED, Retrained, retrain
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

RETRAIN_KEYS = (
    "shape", "retrain_steps", "retrain_factor", "learning_rate", "learning_rate_warmup",
    "validation_sequences", "evaluate_every", "rounding", "hadamard",
)  # fmt: skip
"""What a retrained plan depends on besides itself, its target and the seed."""
REFERENCE = "all_16_bit"
"""Its smoothed test loss after `retrain_steps` is the target of a retraining seed."""
EXACT = Candidate(1, 1)
"""A block that trains as a plan without lossy collectives does, whatever its degrees."""

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

    def _retrain_arms(self, plan: SeedPlan, tracker: BilevelTracker | None) -> list[dict[str, Any]]:
        """One row for every arm, plan and retraining seed."""
        settings = plan.search.settings
        arms = [(arm, own) for arm in settings.arms for own in arm_plans(arm, plan.search, plan.found)]
        first = FIRST_RETRAIN_SEED + settings.seed * settings.retrain_seeds
        seeds = [first + index for index in range(settings.retrain_seeds)]
        reference = (EXACT,) * settings.num_blocks
        batch = settings.global_batch_size
        targets = dict(
            zip(seeds, self._train([(reference, batch, s, None) for s in seeds], settings), strict=True)
        )
        wanted = [
            (own.blocks, own.global_batch_size, s, targets[s].final_loss) for _, own in arms for s in seeds
        ]
        curves = iter(self._train(wanted, settings))
        rows = []
        for arm, own in arms:
            for seed in seeds:
                curve, target = next(curves), targets[seed].final_loss
                rows.append(_row(arm, own, seed, curve, target, settings))
                if tracker is not None:
                    tracker.retrained(arm, seed, curve)
        return rows

    def _train(
        self, wanted: Sequence[tuple[Sequence[Candidate], int, int, float | None]], settings: BilevelSettings
    ) -> list[Retrained]:
        """Trainings of blocks, batch, seed and target; equal ones are run once, known ones not at all."""
        folder = self.folder / "retrained"
        keys = [_training_key(*own, settings) for own in wanted]
        paths = [folder / f"{_digest(key)}.json" for key in keys]
        missing = {
            path: (own, key) for path, own, key in zip(paths, wanted, keys, strict=True) if not path.exists()
        }

        folder.mkdir(parents=True, exist_ok=True)
        waiting = list(missing.items())

        def on_done(done: int, curves: Retrained) -> None:
            path, (_, key) = waiting[done - 1]
            write_json(path, key | {"training": curves.training, "test": curves.test})
            self.on_progress(f"seed {settings.seed}: retraining", done, len(waiting))

        arguments = [
            (blocks, batch, settings, self.corpus, seed, target, settings.rounds)
            for (blocks, batch, seed, target), _ in missing.values()
        ]
        self.jobs.map(retrain, arguments, on_done)
        return [_read(path) for path in paths]


def _training_key(
    blocks: Sequence[Candidate], batch: int, seed: int, target: float | None, settings: BilevelSettings
) -> dict[str, Any]:
    values = asdict(settings)
    felt = [candidate.felt() for candidate in blocks]
    return {name: values[name] for name in RETRAIN_KEYS} | {
        "seed": seed, "plan": felt, "batch": batch, "target": target,
    }  # fmt: skip


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> Retrained:
    data = json.loads(path.read_text(encoding="utf-8"))
    training, test = (tuple((step, loss) for step, loss in data[name]) for name in ("training", "test"))
    return Retrained(training, test)


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
            "nats_per_efold": trials.nats_per_efold,
            "sums": {f"tp{tp} b{bits}": nats for (tp, bits), nats in trials.forward.items()},
            "gradients": {f"dp{dp} g{bits}": nats for (dp, bits), nats in trials.gradient.items()},
        },
        "log_steps": {
            "sums": {f"tp{tp} b{bits}": known.forward[:, i].tolist()
                     for i, (tp, bits) in enumerate(known.forward_pairs)},
            "gradients": {f"dp{dp} g{bits}": known.gradient[:, i].tolist()
                          for i, (dp, bits) in enumerate(known.gradient_pairs)},
        },
    }  # fmt: skip


__all__ = ["REFERENCE", "RETRAIN_ONLY", "Protocol", "SeedPlan"]
