"""The DARTS protocol: search, then retrain the found plan and its rivals from scratch, for several seeds.

A folder holds one JSON file for each finished seed, `bilevel.csv` (every run), `report.md` (medians,
spread, paired differences), checkpoints and TensorBoard curves. Finished seeds are not run again, and a
search that was killed resumes where its last checkpoint stands.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from darts_parallel.bilevel.candidates import Candidate
from darts_parallel.bilevel.data import Corpus, load_corpus
from darts_parallel.bilevel.loop import (
    BilevelPlan,
    BilevelRecord,
    BilevelSearch,
    at_batch,
    fingerprint,
    resume,
)
from darts_parallel.bilevel.report import write_report
from darts_parallel.bilevel.retrain import (
    Retrained,
    fastest_plan,
    fastest_with_bits,
    random_plan_of_equal_time,
    retrain,
)
from darts_parallel.bilevel.settings import BilevelSettings
from darts_parallel.bilevel.time_model import TimeModel
from darts_parallel.bilevel.tracking import BilevelTracker
from darts_parallel.cost.evaluation import evaluate
from darts_parallel.errors import ConfigError
from darts_parallel.plan.file import write_json
from darts_parallel.plan.strategy import Plan
from darts_parallel.problem.problem import Problem
from darts_parallel.report import text as report
from darts_parallel.report.plan_json import plan_dict
from darts_parallel.report.tensorboard import Tracker

RETRAIN_KEYS = (
    "shape", "num_devices", "retrain_steps", "learning_rate", "learning_rate_warmup", "validation_sequences",
    "evaluate_every",
)  # fmt: skip
"""What a retrained plan depends on besides itself and the seed."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is done now, steps done and steps in all."""


@dataclass(frozen=True)
class Protocol:
    """Runs the seeds of one problem.

    Attributes:
        problem: With `config.bilevel`.
        corpus: Bytes.
        folder: For all files.
        tensorboard: Whether curves are written.
        on_progress: See `OnProgress`.
    """

    problem: Problem
    corpus: Corpus
    folder: Path
    tensorboard: bool = True
    on_progress: OnProgress = lambda text, done, total: None

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
            different = [k for k in mark if k != "seeds" and data["settings"].get(k) != mark[k]]
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
        """Search, then retrain every arm from scratch with the same seed."""
        name = f"seed-{settings.seed}"
        search = BilevelSearch(settings, self.problem, self.corpus)
        tracker = (
            BilevelTracker(self.folder / "tensorboard" / name, search.choices, settings.batches)
            if self.tensorboard
            else None
        )

        def on_record(record: BilevelRecord) -> None:
            self.on_progress(f"seed {settings.seed}: search", record.step, settings.num_steps)
            if tracker is not None:
                tracker.record(record)

        try:
            checkpoints = self.folder / "checkpoints" / name
            resume(search, checkpoints, lambda text: print(text, file=sys.stderr))
            found = search.run(on_record, checkpoints)
            runs = {arm: self._run_arm(arm, search, found, tracker) for arm in settings.arms}
        finally:
            if tracker is not None:
                tracker.close()
        return {
            "seed": settings.seed,
            "settings": self._mark(settings),
            "plan": bilevel_plan_dict(self.problem, search, found),
            "runs": runs,
            "noise_sequences": search.trainer.noise.sequences,
            "largest_weight": search.candidate_weights().amax(1).tolist(),
        }

    def _run_arm(
        self, arm: str, search: BilevelSearch, found: BilevelPlan, tracker: BilevelTracker | None
    ) -> dict[str, Any]:
        settings = search.settings
        plan = arm_plan(arm, search, found)
        time = search.upper.times[settings.batches.index(plan.global_batch_size)]

        def on_loss(name: str, step: int, loss: float) -> None:
            self.on_progress(f"seed {settings.seed}: retraining {arm}", step, settings.retrain_steps)
            if tracker is not None:
                tracker.retrained(arm, name, step, loss)

        curves = retrain_once(plan, settings, self.corpus, self.folder / "retrained", on_loss)
        exchange = curves.exchange
        return {
            "plan": [candidate.label() for candidate in plan.blocks],
            "global_batch_size": plan.global_batch_size,
            "seconds_per_step": float(time.plan_seconds([plan.blocks])[0]),
            "validation_loss": curves.final_loss,
            "nats_per_efold": exchange.nats_per_efold if exchange else None,
            "validation": curves.validation,
        }


def bilevel_plan_dict(problem: Problem, search: BilevelSearch, found: BilevelPlan) -> dict[str, Any]:
    """The found plan as `plan.json` holds it."""
    here = at_batch(problem, found.global_batch_size)
    time = search.upper.times[search.settings.batches.index(found.global_batch_size)]
    plan = time.whole_plan(found.blocks)
    return plan_dict(here, plan, evaluate(plan, here), None, [])


def arm_plan(arm: str, search: BilevelSearch, found: BilevelPlan) -> BilevelPlan:
    """The plan of one arm; all but the found one at the nominal global batch size."""
    settings = search.settings
    blocks, nominal, batches = settings.num_blocks, settings.global_batch_size, settings.batches
    time: TimeModel = search.upper.times[batches.index(nominal) if nominal in batches else 0]
    same = search.upper.times[batches.index(found.global_batch_size)]
    generator = torch.Generator().manual_seed(settings.seed + 4)
    makers: dict[str, Callable[[], tuple[Candidate, ...]]] = {
        "bilevel": lambda: found.blocks,
        "all_16_bit": lambda: fastest_with_bits(time, blocks, 16),
        "all_4_bit": lambda: fastest_with_bits(time, blocks, 4),
        "time_only": lambda: fastest_plan(time, blocks, time.choices.candidates),
        "random_equal_time": lambda: random_plan_of_equal_time(same, found.blocks, generator),
    }
    batch = found.global_batch_size if arm in ("bilevel", "random_equal_time") else nominal
    return BilevelPlan(makers[arm](), batch)


def retrain_once(
    plan: BilevelPlan,
    settings: BilevelSettings,
    corpus: Corpus,
    folder: Path,
    on_loss: Callable[[str, int, float], None],
) -> Retrained:
    """Retrain, or take the curves of the same training from an earlier arm."""
    values = asdict(settings)
    key = {name: values[name] for name in RETRAIN_KEYS}
    key |= {"seed": settings.seed, "plan": [c.label() for c in plan.blocks], "batch": plan.global_batch_size}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{digest}.json"
    if not path.exists():
        curves = retrain(plan, settings, corpus, settings.seed, on_loss)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, key | {"training": curves.training, "validation": curves.validation})
        return curves
    data = json.loads(path.read_text(encoding="utf-8"))
    curves = Retrained(
        *(tuple((step, loss) for step, loss in data[name]) for name in ("training", "validation"))
    )
    for name, curve in (("train", curves.training), ("validation", curves.validation)):
        for step, loss in curve:
            on_loss(name, step, loss)
    return curves


def run_bilevel(
    problem: Problem,
    folder: Path,
    console: Console,
    tracker: Tracker | None,
    update: Callable[[int, str], None],
) -> float:
    """Run all seeds; `plan.json` is the first seed's plan, written as soon as there is one.

    Args:
        problem: With `config.bilevel`.
        folder: For all files.
        console: For the report.
        tracker: For the pictures of the plan; None writes none.
        update: Shows steps done and a text.

    Returns:
        Predicted seconds per iteration of the first seed's plan.
    """
    plans: list[Plan] = []

    def on_seed(seed: int, data: dict[str, Any]) -> None:
        if not plans:
            write_json(folder / "plan.json", data["plan"])
        plans.append(Plan.from_dict(data["plan"]))
        console.print(f"seed {seed}: {', '.join(data['runs']['bilevel']['plan'])}", highlight=False)

    def on_progress(text: str, done: int, total: int) -> None:
        update(done, f"{text}, step {done} of {total}")

    text = Protocol(problem, load_corpus(), folder, problem.config.output.tensorboard, on_progress).run(
        on_seed
    )
    cost = evaluate(plans[0], problem)
    report.render(problem, None, plans[0], cost, [], console)
    if tracker is not None:
        tracker.finish(None, plans[0], cost, [])
    console.print(text, highlight=False)
    for name, path in (("plan", "plan.json"), ("runs", "bilevel.csv"), ("report", "report.md")):
        console.print(f"{name}: {folder / path}", soft_wrap=True, highlight=False)
    return cost.iteration_time_s
